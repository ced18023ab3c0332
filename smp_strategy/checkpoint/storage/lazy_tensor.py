"""Lazy tensor of a checkpoint: shape and dtype are known, values are read at the first use.

A loaded state passes through the user's hooks, which look at names and shapes, drop or rename entries, and sometimes
use values. So a folder is offered like an ordinary file, as a dict of tensors. The first use reads the values and keeps
them. The most frequent use, ``copy_`` into a parameter, reads them without keeping them, so that loading a model tensor
by tensor never needs memory for two.
"""

from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.storage.source import Source
from smp_strategy.distributed.torch_private import plain_functions

__all__ = ["Readable", "LazyStoredTensor"]

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
