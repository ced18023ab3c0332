"""Attention with some of the heads: its attention weights appear as those of all heads.

Models return attention weights on request (``output_attentions``), with an entry for each head. They are returned as a
split tensor, which is gathered only if code reads it.
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
        weights_at: Position of the attention weights [batch, head, query, key] in the result of the dense
            attention.
    """

    weights_at: int

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, sizes: Mapping[str, int], weights_at: int) -> Self:
        """Change ``layer`` in place.

        Args:
            layer: An attention.
            group: Ranks that have the heads.
            sizes: New values of attributes of the layer.
            weights_at: See the class.

        Raises:
            CannotSplit: Its results cannot be changed.
        """
        if "forward" in vars(layer):
            raise CannotSplit(f"the forward of this {type(layer).__name__} has been replaced")
        return cls._split(layer, group, {}, sizes, {"weights_at": weights_at})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the dense attention, with split attention weights."""
        result = type(self)._dense.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        at = self.weights_at
        if not isinstance(result, tuple) or len(result) <= at or not isinstance(result[at], Tensor):
            return result
        weights = result[at]
        lengths = [weights.shape[HEADS_DIM]] * self.group.size
        return *result[:at], SplitTensor.from_part(weights, self.group, HEADS_DIM, lengths), *result[at + 1 :]
