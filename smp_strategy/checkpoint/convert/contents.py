"""Format-independent content of a checkpoint: weights, optimizer state and the rest, with lazy tensors.

Every format is opened as :class:`CheckpointContents` and written from it, so that any can be converted to any other.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.model.trace.pytree import nodes

__all__ = ["CheckpointContents", "LazyTensor", "OptimizerContents", "tensors_of"]


@final
@dataclass(frozen=True, eq=False)
class LazyTensor:
    """Tensor of which shape and dtype are known before it is read. Values are not kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns the values, on the host; must not be written to."""
    memory: Hashable = None
    """Key that is equal for tensors that share memory or bytes of a file; ``None``: not known to be shared."""
    is_mapped: bool = False
    """Whether reading takes no memory, or none besides what is taken already."""

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """A tensor in memory, or mapped from a file."""
        tensor = tensor.detach()
        memory: Hashable = None
        if tensor.layout == torch.strided and tensor.numel():
            memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor, memory, True)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def changed(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "LazyTensor":
        """Apply ``change``, which keeps the shape, when the tensor is read."""
        return LazyTensor(self.shape, dtype or self.dtype, lambda: change(self.read()), self.memory)


@final
@dataclass(eq=False)
class OptimizerContents:
    """State of an optimizer, by the names of its parameters."""

    state: dict[str, dict[str, Any]]
    """State of each parameter: tensors are :class:`LazyTensor`, in lists and dicts, too."""
    groups: list[dict[str, Any]]
    """Options of the groups; ``params`` has names."""


@final
@dataclass(eq=False, kw_only=True)
class CheckpointContents:
    """Content of a checkpoint of any format."""

    kind: str
    """Format, for people: ``sharded checkpoint``."""
    weights: dict[str, Any]
    """Weights by the names of the state dict; objects other than :class:`LazyTensor` are extra state of modules."""
    optimizers: list[OptimizerContents] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    """Other entries of a Lightning checkpoint; empty for other formats. Tensors may be :class:`LazyTensor`."""
    note: dict[str, Any] = field(default_factory=dict)
    """Layout that wrote it, step, epoch."""
    has_digests: bool = False
    """Whether damage would be noticed."""
    remarks: list[str] = field(default_factory=list)
    """Messages about content that was left out or guessed while it was opened."""

    @property
    def is_lightning(self) -> bool:
        """Whether names begin with an attribute of a LightningModule."""
        return "pytorch-lightning_version" in self.rest

    def weight_tensors(self) -> dict[str, LazyTensor]:
        """The weights without extra state."""
        return {name: value for name, value in self.weights.items() if isinstance(value, LazyTensor)}


def tensors_of(value: Any) -> Iterator[LazyTensor]:
    """The tensors in dicts, lists and tuples."""
    return (node for _, node in nodes(value) if isinstance(node, LazyTensor))
