"""Reads folders of PyTorch's distributed checkpoints: ours, Lightning's, FSDP's, and those of a plain ``dcp.save``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.convert.layouts import contents_of
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.torch_load import allowing_plain_values

__all__ = ["open_sharded"]

# Placeholder `{_MARK: number}` of a tensor nested in the rest, which is stored as `spread.<number>`.
_MARK, _SPREAD = "smp_strategy/spread", "spread"
_NUMBERED: Final = (list, tuple)


def open_sharded(path: Path, *, weights_at: str | None = None) -> CheckpointContents:
    """Open a folder; tensors are read later, and verified then if there are digests.

    Args:
        path: Folder.
        weights_at: See :func:`~smp_strategy.checkpoint.convert.layouts.contents_of`.

    Raises:
        CheckpointError: it is damaged, or has no weights.
    """
    stored = CheckpointReader.open(path)
    aliases = stored.aliases
    tree: dict[str, Any] = {}
    for name, described in stored.tensors.items():
        memory = (str(path), aliases.get(name, name))
        lazy = LazyTensor(described.shape, described.dtype, partial(stored.read, name), memory)
        _put(tree, stored.paths[name], lazy)
    with allowing_plain_values():
        for name, value in stored.read_objects(stored.objects).items():
            _put(tree, stored.paths[name], value)
        rest = stored.rest()
    spread = tree.pop(_SPREAD, {}) if _has_marks(rest) else {}
    found = contents_of(
        _with_lists(tree),
        kind="sharded checkpoint",
        source=str(path),
        rest=_unmarked(rest, spread),
        weights_at=weights_at,
    )
    found.note = dict(stored.note) or found.note
    found.has_digests = stored.has_digests
    return found


def _put(tree: dict[Any, Any], way: tuple[Any, ...], value: Any) -> None:
    for key in way[:-1]:
        tree = tree.setdefault(key, {})
    tree[way[-1]] = value


def _with_lists(value: Any) -> Any:
    """Restore lists of tensors, which are stored item by item."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and items.keys() == set(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items


def _has_marks(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _MARK in value or any(map(_has_marks, value.values()))
    return isinstance(value, _NUMBERED) and any(map(_has_marks, value))


def _unmarked(value: Any, spread: Mapping[str, Any]) -> Any:
    if not _has_marks(value):
        return value
    if isinstance(value, Mapping):
        if value.keys() == {_MARK}:
            return spread[value[_MARK]]
        return {key: _unmarked(item, spread) for key, item in value.items()}
    return type(value)(_unmarked(item, spread) for item in value)
