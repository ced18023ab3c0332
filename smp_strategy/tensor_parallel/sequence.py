"""Sequence parallelism: between split regions each rank has some of the tokens.

Tensor parallelism leaves what stands between the regions as it is: norms, dropout and sums of the residual stream are
computed by all ranks alike, and each keeps all activations of them. They treat each token by itself, so each rank can
have some tokens: the stream is a :class:`~smp_strategy.tensor_parallel.split_tensor.SplitTensor` along the sequence. A
region then begins with gathering its parts, and ends with a sum of which each rank gets its part, which together is as
much to send as the one sum of all before (Korthikanti et al. 2022).

Code of the layers goes on unchanged. :class:`SequenceParallel` stands at the ends of a chain of layers, and at each of
them, for a layer may get its input from another pipeline stage, which sends it whole.

Weights of norms meet the tokens of this rank only, so their gradients are summands. They are added up together, once
for each layer (:class:`Copies`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from smp_strategy.errors import UnsupportedError
from smp_strategy.tensor_parallel import functions
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.region import RowParallelLayer
from smp_strategy.tensor_parallel.split_layer import SplitLayer
from smp_strategy.tensor_parallel.split_parts import Parts
from smp_strategy.tensor_parallel.split_tensor import SplitTensor

__all__ = ["Copies", "SequenceParallel"]

_STREAM = "hidden_states"
"""What Hugging Face calls the first argument of its layers."""


@final
class Copies:
    """Whole tensors, for each rank to use with its tokens: their gradients are added up, all in one message.

    Args:
        tensors: which.
        group: the ranks.
    """

    def __init__(self, tensors: Iterable[Tensor], group: TensorGroup) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._group = group
        self._copies: dict[int, Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The copy of ``tensor``, if it is one of them."""
        if id(tensor) not in self._tensors:
            return None
        if self._copies is None:
            # Not before the first of them is used: a shard may have to be gathered.
            wanted = {number: tensor for number, tensor in self._tensors.items() if tensor.requires_grad}
            copies = functions.copy_together(list(wanted.values()), self._group)
            self._copies = dict(zip(wanted, copies, strict=True))
        return self._copies.get(id(tensor))


@final
class SequenceParallel:
    """Lets the residual stream of a chain of layers be split along the sequence.

    The first argument of each layer is the stream, and so is its result, or the first element of it.

    Args:
        layers: in the order in which the stream passes them; their regions are split already.
        group: the ranks.
        dim: along which tokens stand.
        ends_whole: whether the result of the last layer is put together; otherwise it goes on as a split tensor.
    """

    def __init__(
        self, layers: Sequence[nn.Module], group: TensorGroup, *, dim: int = 1, ends_whole: bool = True
    ) -> None:
        self._group = group
        self._dim = dim
        self._handles: list[RemovableHandle] = []
        self._rows = [row for layer in layers for row in layer.modules() if isinstance(row, RowParallelLayer)]
        for row in self._rows:
            row.splits_output = dim
        for layer in layers:
            self._handles += [
                layer.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                layer.register_forward_hook(self._end, always_call=True),
            ]
        if ends_whole:
            self._handles.append(layers[-1].register_forward_hook(_put_together))

    def remove(self) -> None:
        """Let layers be as they were."""
        for handle in self._handles:
            handle.remove()
        for row in self._rows:
            row.splits_output = None
        self._handles.clear()
        self._rows.clear()

    def _begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = args[0] if args else kwargs.get(_STREAM)
        if not isinstance(stream, Tensor) or stream.dim() <= self._dim:
            raise UnsupportedError(
                f"Sequence parallelism of {type(layer).__name__}: its first argument should be the residual stream, a "
                f"tensor with tokens along dim {self._dim}, but is {_described(stream)}. Give it the tensor as its "
                f"first argument, or as `{_STREAM}`."
            )
        self._group.copies = Copies(_whole_parameters(layer), self._group)
        if isinstance(stream, Parts):
            return None
        split = SplitTensor.from_whole(stream, self._group, self._dim)
        return ((split, *args[1:]), kwargs) if args else (args, {**kwargs, _STREAM: split})

    def _end(self, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._group.copies = None


def _whole_parameters(layer: nn.Module) -> Iterable[Tensor]:
    """Those that are the same on all ranks."""
    for module in layer.modules():
        if not isinstance(module, SplitLayer):
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def _put_together(layer: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    return pytree.tree_map_only(Parts, lambda split: split.whole(), result)


def _described(value: Any) -> str:
    return f"of size {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
