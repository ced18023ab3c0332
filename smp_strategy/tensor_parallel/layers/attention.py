"""An attention of which a rank has some heads, as the code around it sees it.

It says how much each position looks at each other one, for each head. Models hand that out where they are asked to
(``output_attentions``), and so should be that of all heads: it is a split tensor, whose parts are put together if
somebody looks.
"""

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.layers.base import CannotSplit, SplitLayer
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor

__all__ = ["SomeHeads"]

HEADS_DIM = 1


class SomeHeads(SplitLayer):
    """An attention whose projections are split by heads.

    Attributes:
        weights_at: where in the result of the dense attention its weights are: [batch, head, query, key].
    """

    weights_at: int

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, sizes: Mapping[str, int], weights_at: int) -> Self:
        """Change ``layer`` in place.

        Args:
            layer: an attention.
            group: the ranks that have the heads.
            sizes: attributes of the layer, as they are from now on.
            weights_at: see the class.

        Raises:
            CannotSplit: its results cannot be changed.
        """
        if "forward" in vars(layer):
            raise CannotSplit(f"the forward of this {type(layer).__name__} has been replaced")
        return cls._split(layer, group, {}, sizes, {"weights_at": weights_at})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the dense attention computes."""
        result = type(self)._dense.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        at = self.weights_at
        if not isinstance(result, tuple) or len(result) <= at or not isinstance(result[at], Tensor):
            return result
        weights = result[at]
        lengths = [weights.shape[HEADS_DIM]] * self.group.size
        return *result[:at], SplitTensor.from_part(weights, self.group, HEADS_DIM, lengths), *result[at + 1 :]
