"""A state that is in memory as a whole, or mapped from a file, as a source: each rank copies what it needs."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from smp_strategy.checkpoint.storage.held_tensor import Held
from smp_strategy.errors import CheckpointError

__all__ = ["WholeState", "flattened"]


@final
class WholeState:
    """A :class:`~smp_strategy.checkpoint.storage.source.Source`.

    Args:
        entries: tensors and other objects, by their names; see :func:`flattened`.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, whole."""
        return {name: value for name, value in self._entries.items() if isinstance(value, Tensor)}

    @property
    def objects(self) -> list[str]:
        """The names of everything else."""
        return [name for name, value in self._entries.items() if not isinstance(value, Tensor)]

    def fill(self, wanted: Mapping[str, Held]) -> None:
        """Copy values to the blocks of this rank, which may be of another dtype or on another device."""
        for name, held in wanted.items():
            whole = self._entries.get(name)
            if not isinstance(whole, Tensor) or tuple(whole.shape) != tuple(held.shape):
                found = f"a tensor of shape {list(whole.shape)}" if isinstance(whole, Tensor) else repr(type(whole))
                raise CheckpointError(f"`{name}` should be a tensor of shape {list(held.shape)}, but is {found}.")
            for block in held.blocks:
                part = whole.detach()
                for dim, (offset, size) in enumerate(zip(block.offsets, block.tensor.shape, strict=True)):
                    part = part.narrow(dim, offset, size)
                block.tensor.copy_(part)

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
        return {name: self._entries[name] for name in names}


def flattened(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dicts in dicts as one, whose keys have dots between those on the way."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found.update(flattened(value, f"{prefix}{key}."))
        elif isinstance(value, Held) and value.aliases:
            found[f"{prefix}{key}"] = replace(value, aliases=tuple(prefix + alias for alias in value.aliases))
        else:
            found[f"{prefix}{key}"] = value
    return found
