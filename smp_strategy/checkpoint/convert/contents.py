"""What a checkpoint has, whatever its form: weights, state of optimizers and the rest, tensors not yet read.

Every form is opened as :class:`CheckpointContents` and written from :class:`CheckpointContents`, so that any can become
any other.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["CheckpointContents", "LazyTensor", "OptimizerContents", "map_tensors", "tensors_of"]


@final
@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor of which only the shape is known until it is read. Nothing keeps what has been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns the values, on the host; must not be written to."""
    memory: Hashable = None
    """Tensors that are one in memory or in a file have an equal one; ``None``: not known to be shared."""
    is_mapped: bool = False
    """Whether reading takes no memory, or none besides what is taken already."""

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """Of a tensor that is there, or is mapped from a file."""
        tensor = tensor.detach()
        memory: Hashable = None
        if tensor.layout == torch.strided and tensor.numel():
            memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor, memory, True)

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def changed(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "LazyTensor":
        """With ``change`` applied when it is read; it keeps the shape."""
        return LazyTensor(self.shape, dtype or self.dtype, lambda: change(self.read()), self.memory)


@final
@dataclass(eq=False)
class OptimizerContents:
    """The state of an optimizer, whose parameters are called by their names."""

    state: dict[str, dict[str, Any]]
    """For each parameter what is kept: tensors are :class:`LazyTensor`, in lists and dicts, too."""
    groups: list[dict[str, Any]]
    """The options; ``params`` has names."""


@final
@dataclass(eq=False, kw_only=True)
class CheckpointContents:
    """Everything that a checkpoint has."""

    kind: str
    """What it is, for people: ``sharded checkpoint``."""
    weights: dict[str, Any]
    """By the names of the state dict; other objects than :class:`LazyTensor` are extra state of modules."""
    optimizers: list[OptimizerContents] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    """What a Lightning checkpoint has besides; empty for others. Tensors may be :class:`LazyTensor`."""
    note: dict[str, Any] = field(default_factory=dict)
    """Which layout wrote it, and when."""
    has_digests: bool = False
    """Whether damage would be noticed."""
    remarks: list[str] = field(default_factory=list)
    """What was left out or guessed while it was opened."""

    @property
    def is_lightning(self) -> bool:
        """Whether names begin with an attribute of a LightningModule."""
        return "pytorch-lightning_version" in self.rest

    def weight_tensors(self) -> dict[str, LazyTensor]:
        """The weights without extra state."""
        return {name: value for name, value in self.weights.items() if isinstance(value, LazyTensor)}


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """``value`` with its tensors, in dicts, lists and tuples, replaced by what ``change`` makes of them."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return {key: map_tensors(item, change, kind) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change, kind) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[LazyTensor]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
