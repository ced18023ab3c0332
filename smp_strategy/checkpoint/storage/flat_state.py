"""A nested state as PyTorch's distributed checkpoints have it: flat names, and for each the way to its place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from smp_strategy.checkpoint.storage.held_tensor import Held, Opaque
from smp_strategy.errors import CheckpointError

__all__ = ["FlatState", "Path"]

Path = tuple[str | int, ...]


@final
@dataclass(frozen=True)
class FlatState:
    """The leaves of a state by their flat names."""

    tensors: Mapping[str, Held]
    objects: Mapping[str, Any]
    paths: Mapping[str, Path]
    """The way to each, and to each alias."""
    aliases: Mapping[str, tuple[str, ...]]
    """Further flat names of tensors that have some."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "FlatState":
        """Flatten dicts, and lists with dicts or tensors in them, as ``torch.distributed.checkpoint.save`` does.

        Raises:
            CheckpointError: two leaves have the same flat name.
        """
        try:
            flat, found = flatten_state_dict(dict(state))
        except ValueError as error:
            raise CheckpointError(f"The state cannot be saved: {error}. Rename one of the two entries.") from error
        tensors: dict[str, Held] = {}
        objects: dict[str, Any] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        paths: dict[str, Path] = dict(found)
        for name, leaf in flat.items():
            if isinstance(leaf, Tensor):
                leaf = Held.whole(leaf.detach())
            if not isinstance(leaf, Held):
                objects[name] = leaf.value if isinstance(leaf, Opaque) else leaf
                continue
            tensors[name] = leaf
            if leaf.aliases:
                around = paths[name][:-1]
                further = {".".join(map(str, (*around, alias))): (*around, alias) for alias in leaf.aliases}
                if taken := sorted(further.keys() & flat.keys()):
                    raise CheckpointError(f"`{taken[0]}` is in the state, and is a tied name of `{name}` as well.")
                paths.update(further)
                aliases[name] = tuple(further)
        return cls(tensors, objects, paths, aliases)
