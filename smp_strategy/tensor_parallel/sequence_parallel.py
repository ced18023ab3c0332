"""Sequence parallelism: between split regions each rank has some of the tokens.

Tensor parallelism does not touch the code between regions: norms, dropout and the residual stream are computed, and
their activations kept, by all ranks alike. They treat each token by itself, so each rank can take some tokens: the
stream is a :class:`~smp_strategy.tensor_parallel.sharded_tensor.tensor.SplitTensor` along the sequence. A region then
begins with an all-gather and ends with a reduce-scatter, which together send as much as the one all-reduce before
(Korthikanti et al. 2022). A rank keeps only its part, so parts are gathered once more in backward, for the gradients of
weights.

The code of the layers is unchanged. A chain of them (:class:`SequenceParallel`) splits the stream at its beginning, and
at each layer that gets it whole, such as the first one of a pipeline stage; at the end the stream is gathered.

Weights of norms meet the tokens of this rank only, so their gradients are all-reduced, in one message per layer
(:mod:`~smp_strategy.tensor_parallel.autograd_collectives`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.tensor_parallel.autograd_collectives import ReplicatedWeights
from smp_strategy.tensor_parallel.layers.base import CannotSplit, SplitLayer
from smp_strategy.tensor_parallel.region import RowParallelLayer
from smp_strategy.tensor_parallel.sharded_tensor.parts import InParts
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor

__all__ = ["SequenceParallel", "chains"]

_STREAM = "hidden_states"
"""Name of the first argument of Hugging Face's layers."""


def chains(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Lists of layers in ``module`` whose stream can be split, by name: those with a region in each layer."""
    found: dict[str, list[nn.Module]] = {}
    inside: set[nn.Module] = set()
    for name, layers in module.named_modules():
        if layers in inside or not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        if any(isinstance(layer, SplitLayer) or "forward" in vars(layer) for layer in layers):
            continue
        if all(any(isinstance(part, RowParallelLayer) for part in layer.modules()) for layer in layers):
            found[name] = list(layers)
            inside.update(layers.modules())
    return found


@final
class SequenceParallel:
    """Splits the residual stream of a chain of layers along the sequence.

    The first argument of each layer is the stream, and so is its result, or the first element of it.

    Args:
        layers: Layers in the order in which the stream passes them; their regions are split already.
        group: Ranks of the tensor-parallel group.
        dim: Dim of the tokens.
        ends_whole: Whether the result of the last layer is gathered; otherwise it stays a split tensor.

    Raises:
        CannotSplit: A layer has a ``forward`` on its instance, or is split itself.
    """

    def __init__(
        self, layers: Sequence[nn.Module], group: TensorGroup, *, dim: int = 1, ends_whole: bool = True
    ) -> None:
        for layer in layers:
            if isinstance(layer, SplitLayer) or "forward" in vars(layer):
                raise CannotSplit(f"the forward of this {type(layer).__name__} has been replaced")
        self._rows = [row for layer in layers for row in layer.modules() if isinstance(row, RowParallelLayer)]
        for row in self._rows:
            row.splits_output = dim
        self._layers = [
            SequenceParallelLayer.from_dense(layer, group, dim, ends_whole=ends_whole and layer is layers[-1])
            for layer in layers
        ]

    def remove(self) -> None:
        """Restore the layers."""
        for row in self._rows:
            row.splits_output = None
        for layer in self._layers:
            layer.to_dense()
        self._rows, self._layers = [], []


class SequenceParallelLayer(SplitLayer):
    """A layer of a chain.

    Its ``forward`` is replaced instead of registering hooks: hooks of a pipeline's units may run where values do not
    exist.
    """

    _dim: int
    _ends_whole: bool

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, dim: int, *, ends_whole: bool) -> Self:
        """Change ``layer`` in place. Arguments as in :class:`SequenceParallel`."""
        return cls._split(layer, group, {}, {}, {"_dim": dim, "_ends_whole": ends_whole})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the dense layer for its first argument in parts."""
        args, kwargs = self._in_parts(args, kwargs)
        self.group.remember(ReplicatedWeights(_whole_parameters(self), self.group))
        try:
            result = type(self)._dense.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self.group.forget(ReplicatedWeights)
        return pytree.tree_map_only(InParts, InParts.whole, result) if self._ends_whole else result

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stream = args[0] if args else kwargs.get(_STREAM)
        if not isinstance(stream, Tensor) or stream.dim() <= self._dim:
            raise UnsupportedError(
                f"Sequence parallelism of {type(self)._dense.__name__}: its first argument should be the residual "  # type: ignore[attr-defined]
                f"stream, a tensor with tokens along dim {self._dim}, but is {_described(stream)}. Give it the tensor "
                f"as its first argument, or as `{_STREAM}`."
            )
        if not isinstance(stream, InParts):
            stream = SplitTensor.from_whole(stream, self.group, self._dim)
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, _STREAM: stream})


def _whole_parameters(layer: nn.Module) -> Iterable[Tensor]:
    """Parameters that are the same on all ranks."""
    for module in layer.modules():
        if not isinstance(module, SplitLayer):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def _described(value: Any) -> str:
    return f"of size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
