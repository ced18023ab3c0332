"""Selective activation checkpointing: results of matrix products are kept, everything else is recomputed.

Matrix products, convolutions, attention and recurrent layers are nearly all of the work, and their results only part of
the activations. The kernels between them (norms, activations, additions) are cheap to recompute. A kernel that draws
random numbers (attention with dropout) does not count as a product: skipping it would leave the generator's state
behind, and the next kernel would draw other numbers.

Products are recorded below autograd while the call runs, and replayed in the same order while it runs again. They live
as long as the call can be recomputed. Hooks on saved tensors do not see them, so only inputs are offloaded to the host.

Two kinds of results are recomputed nevertheless: those that are written to before the call is over (an in-place
activation), and those that the call returns, because the caller may change them or keep them longer. Writes are
recorded below autograd, too, by storage: version counters miss some writes, such as those of PyTorch's own recurrent
layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smp_strategy.distributed.torch_private import without_version_key
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.fake_call import draws
from smp_strategy.model.trace.tensor_spec import storage_of

__all__ = ["Products", "is_product"]

_aten = torch.ops.aten

# Products that PyTorch's table of FLOP formulas lacks.
_OTHERS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._grouped_mm,
        _aten.mkldnn_rnn_layer,
        _aten._cudnn_rnn,
    }
)


def is_product(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the kernel ``func`` is a deterministic product that writes to new memory."""
    kind = func.overloadpacket
    is_one = kind in _OTHERS or kind in flop_registry
    return is_one and not func._schema.is_mutable and not draws(func, args, kwargs)


class _Made(NamedTuple):
    """Flattened result of one product."""

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
    """Kept products of one call."""

    def __init__(self) -> None:
        self.recording = _Recording()
        self._is_settled = False
        self._kernels: list[Any] = []
        # Result of each kernel; `None`: it is recomputed.
        self._kept: list[_Made | None] = []

    def settle(self, results: Sequence[Any]) -> None:
        """End the recording of a call that has returned ``results``; drop the products that cannot be kept."""
        lost = self.recording.written | {storage_of(leaf) for leaf in results if isinstance(leaf, Tensor)}
        self._kernels = [made.kernel for made in self.recording.made]
        self._kept = [None if made.storages & lost else made for made in self.recording.made]
        self.recording.clear()
        self._is_settled = True

    def again(self) -> AbstractContextManager[Any]:
        """Context in which a second run gets the kept products."""
        if not self._is_settled:
            return self.recording.paused()  # a backward inside the call itself
        kept = [made if made is not None and made.is_as_made else None for made in self._kept]
        return _Replaying(list(zip(self._kernels, kept, strict=True)))


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[_Made] = []
        self.written: set[int] = set()
        """Storages of products that were written to afterwards."""
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
    """Storages of arguments that ``func`` writes to."""
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(parameter.name)
            yield from (storage_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _alias(tensor: Tensor) -> Tensor:
    """``tensor`` without autograd metadata, but with its version counter."""
    with without_version_key():
        return tensor.detach()


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
