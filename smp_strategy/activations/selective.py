"""Results that a call keeps although it is run once more: those of its products.

A second run that is given the results of matrix products, convolutions and attention has little left to compute. They
are noted below autograd while the call runs, and handed out in the same order while it runs again. They live as long
as the call can be run again. Hooks on saved tensors do not see them: only inputs go into host memory.

Not kept is what something is written into before the call is over (an activation in place), nor what the call returns:
the caller may change it, or keep it longer. These products are simply done again. Writes are noted below autograd, too,
by the memory that they go to: version counters miss some, as those of PyTorch's own recurrent layers.

Which kernels' results are worth keeping where the rest is computed again: those of products.

Matrix products, convolutions, attention and recurrent layers are nearly all of the work, and their results a part of
what is kept. What stands between them (norms, activations, additions) is cheap to compute again. A kernel that draws
random numbers (attention with dropout) is none of these: left out, it would leave the stream where it is, and the next
one would draw other numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.dispatch import draws
from smp_strategy.model.trace.tensor_spec import storage_of

__all__ = ["Products", "is_product"]

_aten = torch.ops.aten

# Those that PyTorch's table of products lacks.
_OTHERS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._grouped_mm,
        _aten.mkldnn_rnn_layer,
        _aten._cudnn_rnn,
    }
)


def is_product(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the kernel ``func`` is a product that comes out the same each time, in memory of its own."""
    kind = func.overloadpacket
    is_one = kind in _OTHERS or kind in flop_registry
    return is_one and not func._schema.is_mutable and not draws(func, args, kwargs)


class _Made(NamedTuple):
    """What a product has returned, taken apart."""

    kernel: Any
    leaves: list[Any]
    structure: Any
    storages: set[int]
    versions: list[int]

    @property
    def is_as_made(self) -> bool:
        return _versions(self.leaves) == self.versions


@final
class Products:
    """Those of one call."""

    def __init__(self) -> None:
        self.recording = _Recording()
        self._is_settled = False
        self._kernels: list[Any] = []
        # What each of them has returned; `None`: it is done again.
        self._kept: list[_Made | None] = []

    def settle(self, results: Sequence[Any]) -> None:
        """The call is over, and has returned ``results``."""
        lost = self.recording.written | {storage_of(leaf) for leaf in results if isinstance(leaf, Tensor)}
        self._kernels = [made.kernel for made in self.recording.made]
        self._kept = [None if made.storages & lost else made for made in self.recording.made]
        self.recording.clear()
        self._is_settled = True

    def again(self) -> AbstractContextManager[Any]:
        """Hands them out, to a second run."""
        if not self._is_settled:
            return self.recording.paused()  # the call itself runs a backward
        kept = [made if made is not None and made.is_as_made else None for made in self._kept]
        return _Replaying(list(zip(self._kernels, kept, strict=True)))


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[_Made] = []
        self.written: set[int] = set()
        """Memory of products that something was written into afterwards."""
        self._known: set[int] = set()
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def clear(self) -> None:
        for noted in (self.made, self.written, self._known):
            noted.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.written.update(self._known.intersection(_written(func, args, kwargs)))
        result = func(*args, **kwargs)
        if not self._is_paused and is_product(func, args, kwargs):
            leaves, structure = pytree.tree_flatten(result)
            leaves = [_alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            storages = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            self._known |= storages
            self.made.append(_Made(func, leaves, structure, storages, _versions(leaves)))
        return result


_NONE_LEFT: tuple[Any, _Made | None] = (None, None)


class _Replaying(TorchDispatchMode):
    def __init__(self, made: Sequence[tuple[Any, _Made | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = iter(made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_product(func, args, kwargs):
            return func(*args, **kwargs)
        kernel, kept = next(self._made, _NONE_LEFT)
        if kernel is not func:
            raise UnsupportedError(
                f"A unit that is computed again in backward calls `{func}` then, where it has called `{kernel}` "
                "before. Leave it out of `activation_checkpointing`."
            )
        if kept is None:
            return func(*args, **kwargs)
        leaves = [_alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in kept.leaves]
        return pytree.tree_unflatten(leaves, kept.structure)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[int]:
    """The memory of arguments that ``func`` writes into."""
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(parameter.name)
            yield from (storage_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _alias(tensor: Tensor) -> Tensor:
    """``tensor`` without what autograd will make of it, and with its version."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
