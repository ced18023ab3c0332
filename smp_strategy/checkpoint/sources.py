"""Sources in memory: a full state dict, or a loaded one that the user's hooks may have edited.

Entries of an edited state that nobody has used are :class:`LazyStoredTensor` still: each rank reads its shards of them
straight to their place, whatever their names are by now. Values of the others are taken from memory.

Lazy tensor of a checkpoint: shape and dtype are known, values are read at the first use.

A loaded state passes through the user's hooks, which look at names and shapes, drop or rename entries, and sometimes
use values. So a folder is offered like an ordinary file, as a dict of tensors. The first use reads the values and keeps
them. The most frequent use, ``copy_`` into a parameter, reads them without keeping them, so that loading a model tensor
by tensor never needs memory for two.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, Source
from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.errors import CheckpointError

__all__ = ["EditedState", "WholeState", "flattened", "Readable", "LazyStoredTensor"]


@final
class WholeState:
    """:class:`~smp_strategy.checkpoint.storage.held_tensor.Source` of full tensors in memory, or mapped from a file.

    Args:
        entries: Tensors and other objects, by their names; see :func:`flattened`.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, whole."""
        return {name: value for name, value in self._entries.items() if isinstance(value, Tensor)}

    @property
    def objects(self) -> list[str]:
        """Names of everything else."""
        return [name for name, value in self._entries.items() if not isinstance(value, Tensor)]

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy values to this rank's rectangles, which may be of another dtype or on another device."""
        for name, held in wanted.items():
            whole = self._entries.get(name)
            if not isinstance(whole, Tensor) or tuple(whole.shape) != tuple(held.shape):
                found = f"a tensor of shape {list(whole.shape)}" if isinstance(whole, Tensor) else repr(type(whole))
                raise CheckpointError(f"`{name}` should be a tensor of shape {list(held.shape)}, but is {found}.")
            for block in held.blocks:
                block.tensor.copy_(block.place.view_of(whole.detach()))

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
        return {name: self._entries[name] for name in names}


def flattened(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found.update(flattened(value, f"{prefix}{key}."))
        elif isinstance(value, HeldTensor) and value.aliases:
            found[f"{prefix}{key}"] = replace(value, aliases=tuple(prefix + alias for alias in value.aliases))
        else:
            found[f"{prefix}{key}"] = value
    return found


@final
class EditedState:
    """:class:`~smp_strategy.checkpoint.storage.held_tensor.Source` of a loaded state after the user's hooks.

    Args:
        state: Nested dicts with tensors and other objects.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._entries = flattened(state)
        self._whole = WholeState(self._entries)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors."""
        return self._whole.tensors

    @property
    def objects(self) -> list[str]:
        """Names of everything else."""
        return self._whole.objects

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy values to this rank's rectangles; unread tensors are read from their own source."""
        unread: dict[Readable, dict[str, HeldTensor]] = {}
        others: dict[str, HeldTensor] = {}
        for name, held in wanted.items():
            tensor = self._entries.get(name)
            if isinstance(tensor, LazyStoredTensor) and not tensor.is_read:
                of_source = unread.setdefault(tensor.source, {})
                if tensor.stored_as not in of_source:
                    of_source[tensor.stored_as] = held
                    continue
            others[name] = held
        for source, of_source in unread.items():
            source.fill(of_source)
        self._whole.fill(others)

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
        return self._whole.read_objects(names)


_PROPERTIES: Any = Tensor
# Functions that need no values.
_KNOWN = frozenset(
    {
        *(_PROPERTIES.shape.__get__, _PROPERTIES.dtype.__get__, _PROPERTIES.layout.__get__, _PROPERTIES.ndim.__get__),
        *(_PROPERTIES.requires_grad.__get__, _PROPERTIES.is_leaf.__get__, _PROPERTIES.itemsize.__get__),
        *(_PROPERTIES.is_sparse.__get__, _PROPERTIES.is_quantized.__get__, _PROPERTIES.grad_fn.__get__),
        *(_PROPERTIES.nbytes.__get__, _PROPERTIES._version.__get__),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
        *(Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.ndimension),
        *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__),
    }
)
# Properties as those of a tensor in host memory; the subclass itself is on the meta device.
_PLACE = {
    _PROPERTIES.device.__get__: torch.device("cpu"),
    _PROPERTIES.is_meta.__get__: False,
    _PROPERTIES.is_cpu.__get__: True,
    Tensor.get_device: -1,
}
# Functions that return the tensor itself, unread.
_ALIKE = (Tensor.detach, Tensor.cpu, torch.detach)


class Readable(Source, Protocol):
    """Source that can read whole tensors."""

    def read(self, name: str) -> Tensor:
        """A tensor in its own host memory."""


@final
class LazyStoredTensor(Tensor):
    """Tensor subclass whose values are in a checkpoint. Results of operations are ordinary tensors."""

    source: Readable
    """Checkpoint that has the values."""
    stored_as: str
    """Name of the tensor in ``source``."""
    _value: Tensor | None

    @staticmethod
    def of(source: Readable, name: str) -> "LazyStoredTensor":
        """The tensor named ``name`` in ``source``."""
        described = source.tensors[name]
        tensor = torch.empty(described.shape, dtype=described.dtype, device="meta").as_subclass(LazyStoredTensor)
        tensor.source, tensor.stored_as, tensor._value = source, name, None
        return tensor

    def value(self) -> Tensor:
        """The ordinary tensor, which is kept: later uses see changes of it."""
        if self._value is None:
            self._value = self._fresh_value()
        return self._value

    @property
    def is_read(self) -> bool:
        """Whether the values were handed out, and may have been changed."""
        return self._value is not None

    def _fresh_value(self) -> Tensor:
        return self.source.read(self.stored_as)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLACE:
            return _PLACE[func]
        if func in _KNOWN:
            with plain_functions():
                return func(*args, **kwargs)
        if func in _ALIKE:
            return args[0]
        if func == Tensor.copy_ and not isinstance(args[0], LazyStoredTensor) and len(args) > 1:
            other = args[1]
            values = other._fresh_value() if other._value is None else other._value
            return func(args[0], values, *args[2:], **kwargs)
        args, kwargs = pytree.tree_map_only(LazyStoredTensor, lambda tensor: tensor.value(), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"
