"""Changes that a step makes to its batch, for hooks that get the batch afterwards.

In one process a hook such as `on_train_batch_end` sees what the step has set, replaced or removed in its batch. Here
the step gets microbatches. Their changes are results of the step, and are merged into the batch as other results are.
They are noted for each container and object in a microbatch, by its path, which leads to its counterpart in the batch.

A list with one entry per sample is in parts, one for each microbatch. Its entries are not merged.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor, nn

from smp_strategy.engine.join_results import merge
from smp_strategy.model.trace.pytree import Path, nodes

__all__ = ["BatchChanges", "BatchContents", "apply_changes", "changes_since", "contents_of_batch"]

# Levels of nesting that are looked into; objects may hold each other.
_MOST_LEVELS: Final = 6


class _Spot(NamedTuple):
    """Key of an entry of a list or tuple."""

    number: int
    length: int
    """Length of the list: another one in the batch, if it has one entry per sample."""


class _ContainerChange(NamedTuple):
    """Changes of one container or object in a microbatch, by key, index or name of the attribute."""

    new: dict[Any, Any]
    gone: frozenset[Any]
    length: int
    """Number of items before the step."""


BatchContents: TypeAlias = Mapping[Path, tuple[Any, dict[Any, Any]]]
"""Containers and objects in a microbatch, with their items, by path."""


class BatchChanges(NamedTuple):
    """Changes of a microbatch."""

    found: dict[Path, _ContainerChange]
    """By the paths of what has changed."""
    node_at: Callable[[Path], Any]
    """Returns the container or object at a path. It is a function, since values of results are made real: a container
    among them would be copied."""


def contents_of_batch(microbatch: Any) -> BatchContents:
    """Containers and objects in ``microbatch``, with their present items."""
    found = nodes(microbatch, _opened, levels=_MOST_LEVELS, once={})
    return {path: (node, _items(node)) for path, node in found if _can_change(node)}


def changes_since(before: BatchContents) -> BatchChanges | None:
    """Changes of containers and objects since :func:`contents_of_batch`; ``None``: there are none."""
    found = {}
    for path, (node, items) in before.items():
        after = _items(node)
        new = {key: value for key, value in after.items() if key not in items or value is not items[key]}
        if new or items.keys() > after.keys():
            found[path] = _ContainerChange(new, frozenset(items.keys() - after.keys()), len(items))
    return BatchChanges(found, lambda path: before[path][0]) if found else None


def apply_changes(batch: Any, changes: Sequence[BatchChanges | None], sizes: Sequence[int]) -> None:
    """Change ``batch`` as its microbatches have been changed.

    Args:
        batch: Batch of the step.
        changes: Changes of each microbatch, with real tensors.
        sizes: Number of samples in each microbatch.
    """
    targets: dict[int, tuple[Any, dict[int, _ContainerChange]]] = {}
    for number, start in enumerate(accumulate(sizes[:-1], initial=0)):
        if (of_microbatch := changes[number]) is None:
            continue
        # All of them are looked up before anything moves.
        for path, change in of_microbatch.found.items():
            if len(sizes) == 1:  # it is the batch itself, and lacks the values of other stages only
                _set_values(of_microbatch.node_at(path), change.new)
            elif (target := _node_at(batch, path, start)) is not None:
                targets.setdefault(id(target), (target, {}))[1][number] = change
    for target, found in targets.values():
        if not isinstance(target, list):
            _change_items(target, found, sizes)
        elif all(change.length == len(target) for change in found.values()):
            _change_list(target, found, sizes)
        else:
            _change_samples(target, found, sizes)


def _opened(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, (list, tuple)):
        return ((_Spot(index, len(node)), item) for index, item in enumerate(node))
    return _items(node).items() if _can_change(node) else ()


def _can_change(node: Any) -> bool:
    if isinstance(node, (Mapping, list)):
        return True
    return hasattr(node, "__dict__") and not (isinstance(node, (Tensor, nn.Module, type)) or callable(node))


def _items(node: Any) -> dict[Any, Any]:
    """Items of a container or an object, by key, index or name of the attribute."""
    if isinstance(node, list):
        return dict(enumerate(node))
    return dict(node if isinstance(node, Mapping) else vars(node))


def _node_at(batch: Any, path: Path, start: int) -> Any:
    """Counterpart in ``batch`` of a node in the microbatch that begins with sample ``start``, if there is one."""
    node = batch
    for key in path:
        if isinstance(node, (list, tuple)):
            node = node[key.number if len(node) == key.length else start + key.number]
        else:
            node = (node if isinstance(node, Mapping) else vars(node)).get(key)
        if node is None:  # an object that cuts itself gives its parts what it lacks
            return None
    return node


def _set_values(node: Any, new: Mapping[Any, Any]) -> None:
    items = node if isinstance(node, (list, MutableMapping)) else vars(node)
    for key, value in new.items():
        items[key] = value


def _merged(found: Mapping[int, _ContainerChange], sizes: Sequence[int]) -> tuple[dict[Any, Any], frozenset[Any]]:
    new = merge([change.new for change in found.values()], [sizes[number] for number in found])
    return new, frozenset[Any]().union(*(change.gone for change in found.values())) - new.keys()


def _change_items(target: Any, found: Mapping[int, _ContainerChange], sizes: Sequence[int]) -> None:
    new, gone = _merged(found, sizes)
    _set_values(target, new)
    for key in gone:
        (target if isinstance(target, MutableMapping) else vars(target)).pop(key, None)


def _change_list(target: list[Any], found: Mapping[int, _ContainerChange], sizes: Sequence[int]) -> None:
    new, gone = _merged(found, sizes)
    # Its indices have no gaps: what has gone was at the end, what is more than before as well.
    end = min(gone, default=max([len(target), *(index + 1 for index in new)]))
    target[:] = [new[index] if index in new else target[index] for index in range(end)]


def _change_samples(target: list[Any], found: Mapping[int, _ContainerChange], sizes: Sequence[int]) -> None:
    """Change a list with one entry per sample; what microbatches append to their parts comes at its end."""
    kept, appended, start = list[Any](), list[list[Any]](), 0
    for number, size in enumerate(sizes):
        change = found.get(number, _ContainerChange({}, frozenset(), size))
        end = min(change.gone, default=size)
        kept += [change.new.get(index, target[start + index]) for index in range(end)]
        appended.append([value for index, value in change.new.items() if index >= size])
        start += size
    target[:] = kept + (merge(appended, sizes) if any(appended) else [])
