"""Batch dimension inference: number of samples of a batch, and its lists with one entry per sample.

A batch is a nest of containers. Its *leaves* are tensors, numpy arrays, packed sequences, and anything else that is no
container. Splitting into microbatches needs the number of samples, and the lists and tuples with one entry per sample:
these are split between their entries, other lists are containers like dicts.

1. The number of samples is the one the data loader has put into the batch, if something in the batch has that length.
   Otherwise it is the first dim on which most tensors agree, of those in the fewest lists, and without tensors the
   length of the first list.
2. A list or tuple of that length, with entries of one kind, has one entry per sample: strings, numbers, objects, dicts,
   tensors of different sizes.
3. But if each of its entries has all samples itself (two views of every image, the fields of a sample), it is a
   container. Two exceptions: dicts beside tensors, since the boxes of an image may be as many as there are images, and
   tensors beside dicts of each sample, since images may be as many as their channels. If the data loader has taken the
   entries over from the samples, that decides.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from smp_strategy.errors import UnsupportedError

__all__ = [
    "BatchSource",
    "Path",
    "Samples",
    "are_alike",
    "find_samples",
    "is_array",
    "is_list",
    "length_of",
    "rebuild_mapping",
    "refuse_other_sizes",
    "samples_in",
    "shown_path",
    "visited",
]

Path = tuple[Any, ...]
Visit = Callable[[Path, Any], Any]
_PLAIN = (str, bytes, Number, type(None), dict, list, type)


class BatchSource(NamedTuple):
    """Composition of a batch, as its data loader knows it."""

    number: int
    """Number of samples in it."""
    lists: frozenset[tuple[Any, ...]] = frozenset()
    """Paths of lists in it with one tensor per sample."""
    others: tuple[int, ...] = ()
    """Numbers of samples that other loaders have put into it."""
    is_of_numbers: bool = False
    """Whether the loader has asked for samples by numbers, which all ranks of a replica draw alike."""


@final
class Samples(NamedTuple):
    """Location of the samples in a batch."""

    number: int | None
    """Number of samples; ``None``: nothing in the batch is per sample."""
    lists: frozenset[Path] = frozenset()
    """Paths of the lists and tuples with one entry per sample."""
    witness: Path = ()
    """Path of a leaf that has all samples."""


def length_of(array: Any) -> int | None:
    """Size of the batch dim of ``array``; ``None``: it has none."""
    if isinstance(array, PackedSequence):
        return int(array.batch_sizes[0])
    if isinstance(array, Tensor):
        return array.size(0) if array.ndim else None
    shape = array.shape if isinstance(array, np.ndarray) else array.batch_size
    return shape[0] if shape else None


def visited(tree: Any, lists: Collection[Path], visit: Visit, path: Path = ()) -> Any:
    """Map ``visit`` over the paths and leaves of ``tree``; ``lists`` and lists without containers are leaves."""
    if is_array(tree):
        return visit(path, tree)
    if isinstance(tree, Mapping):
        items = {key: visited(value, lists, visit, (*path, key)) for key, value in tree.items()}
        return rebuild_mapping(tree, items, lambda name, value: visited(value, lists, visit, (*path, f".{name}")))
    if is_list(tree):
        if path in lists or _is_flat(tree):
            return visit(path, tree)
        entries = [visited(item, lists, visit, (*path, place)) for place, item in enumerate(tree)]
        return tuple(entries) if isinstance(tree, tuple) else entries
    fields = {name: visited(getattr(tree, name), lists, visit, (*path, f".{name}")) for name in _fields(tree)}
    if isinstance(tree, tuple) and fields:
        return type(tree)(**fields)
    if fields:
        rebuilt = copy.copy(tree)
        for name, value in fields.items():
            object.__setattr__(rebuilt, name, value)
        return rebuilt
    return visit(path, tree)


def find_samples(batch: Any, read: BatchSource | None = None) -> Samples:
    """Locate the samples of ``batch`` by the rules above.

    Args:
        batch: Any nest.
        read: Information of the data loader about its samples.
    """
    known = None if read is None else read.number
    votes = list(_votes(batch, (), known))
    number = _number(batch, votes, known)
    if number is None:
        return Samples(None)
    lists = set(read.lists) if read is not None and number == known else set()
    _note_lists(batch, (), number, number == known, votes, lists)
    witness = next((path for path in _arrays_of(batch, (), number) if not _is_inside(path, lists)), None)
    if witness is None:
        witness = min(lists, default=None, key=len)
    return Samples(None) if witness is None else Samples(number, frozenset(lists), witness)


def _arrays_of(tree: Any, path: Path, number: int) -> Iterator[Path]:
    if is_array(tree):
        if length_of(tree) == number:
            yield path
    else:
        for key, item in _items(tree):
            yield from _arrays_of(item, (*path, key), number)


def samples_in(microbatch: Any, samples: Samples) -> int | None:
    """Number of samples in a part of the batch in which ``samples`` were located."""
    found: list[int | None] = []

    def visit(path: Path, leaf: Any) -> None:
        if path == samples.witness:
            found.append(len(leaf) if is_list(leaf) else length_of(leaf))

    if samples.number is not None:
        visited(microbatch, samples.lists, visit)
    return found[0] if found else None


class _Vote(NamedTuple):
    path: Path
    length: int
    is_array: bool
    """``False``: a list without arrays."""
    depth: int
    """Number of enclosing lists."""


def _votes(tree: Any, path: Path, known: int | None, depth: int = 0) -> Iterator[_Vote]:
    """Lengths in ``tree`` that may be the number of samples."""
    if is_array(tree):
        if (length := length_of(tree)) is not None:
            yield _Vote(path, length, True, depth)
    elif is_list(tree) and _is_flat(tree):
        yield _Vote(path, len(tree), False, depth)
    elif is_list(tree):
        inside = [vote for place, item in enumerate(tree) for vote in _votes(item, (*path, place), known, depth + 1)]
        arrays = [vote for vote in inside if vote.is_array]
        is_ragged = len({vote.length for vote in arrays or inside}) > 1 and are_alike(tree)
        # Dicts with such tensors are samples. Of tensors, or lists of them, one may be for all and one for none.
        is_sure = not (arrays and any(is_array(item) or is_list(item) for item in tree))
        if is_ragged and (known == len(tree) or (known is None and is_sure)):
            yield _Vote(path, len(tree), bool(arrays), depth)
        else:
            yield from inside
    else:
        for key, item in _items(tree):
            yield from _votes(item, (*path, key), known, depth)


def _number(batch: Any, votes: list[_Vote], known: int | None) -> int | None:
    arrays = [vote for vote in votes if vote.is_array]
    # Arrays in lists, such as the masks of one image, count only if there are none outside of lists.
    nearest = min((vote.depth for vote in arrays), default=0)
    counted = [vote for vote in arrays if vote.depth == nearest] or votes
    lengths = [vote.length for vote in counted]
    if known is not None and (known in lengths or _could_be_in_lists(batch, counted, known)):
        return known
    # Of several lengths with the most votes, the first one.
    return collections.Counter(lengths).most_common(1)[0][0] if lengths else None


def _could_be_in_lists(batch: Any, votes: list[_Vote], known: int) -> bool:
    """Whether everything that votes for another number is in a list with an entry for each known sample."""
    return bool(votes) and all(
        any(_is_per_entry(_at(batch, vote.path[:depth]), known) for depth in range(len(vote.path))) for vote in votes
    )


def _note_lists(tree: Any, path: Path, number: int, is_known: bool, votes: list[_Vote], found: set[Path]) -> None:
    """Add the paths of lists and tuples in ``tree`` that have one entry per sample to ``found``."""
    if path in found:
        return
    if _is_per_entry(tree, number):
        is_beside = any(vote.is_array and vote.length == number and not _is_inside(vote.path, {path}) for vote in votes)
        if not _is_container(tree, number, is_known=is_known, is_beside=is_beside):
            found.add(path)
            return
    items = {(*path, key): item for key, item in _items(tree)}
    for place, item in items.items():
        _note_lists(item, place, number, is_known, votes, found)
    if any(place in found and isinstance(next(iter(item)), Mapping) for place, item in items.items()):
        # Images beside a list of targets, even if there are as many images as channels.
        found.update(place for place, item in items.items() if _is_per_entry(item, number) and is_array(item[0]))


def _is_container(items: Any, number: int, *, is_known: bool, is_beside: bool) -> bool:
    """Whether each of as many ``items`` as there are samples has all samples itself.

    Args:
        items: List with ``number`` entries.
        number: Number of samples.
        is_known: The number comes from the data loader.
        is_beside: Another array of the batch has this length.
    """
    entries = [item for item in items if item is not None]
    if is_beside and all(isinstance(item, Mapping) for item in entries):
        return False
    # A list of tuples is a list of samples; a tuple of tuples, or a list of lists, was collated from their fields.
    are_samples = isinstance(items, list) and any(isinstance(item, tuple) for item in entries)
    if entries and not are_samples and all(_is_per_entry(item, number) for item in entries):
        return True
    lengths = {frozenset(vote.length for vote in _votes(item, (), None)) for item in entries}
    own, broadcast = frozenset({number}), frozenset({1})
    if is_beside:
        return lengths == {own}
    if any(map(is_array, entries)) and not is_known:
        return True
    return own in lengths and lengths <= {own, broadcast}


def _is_per_entry(tree: Any, number: int) -> bool:
    return is_list(tree) and len(tree) == number and are_alike(tree)


def are_alike(items: Iterable[Any]) -> bool:
    """Whether ``items`` are of one kind, and so may be entries for one sample each."""
    return len({_kind(item) for item in items if item is not None}) <= 1


def _kind(item: Any) -> Any:
    if isinstance(item, (Tensor, np.ndarray)):
        return Tensor if isinstance(item, Tensor) else np.ndarray, item.ndim, item.dtype
    return Number if isinstance(item, (Number, np.generic)) else type(item)


def _is_inside(path: Path, outer: Collection[Path]) -> bool:
    return any(path[: len(each)] == each for each in outer)


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = dict(_items(tree))[key]
    return tree


def _items(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Entries of a container, each with the last part of its path."""
    if is_array(tree):
        return ()
    if isinstance(tree, Mapping):
        return (*tree.items(), *((f".{name}", value) for name, value in _attributes_of(tree).items()))
    if is_list(tree):
        return () if _is_flat(tree) else enumerate(tree)
    return [(f".{name}", getattr(tree, name)) for name in _fields(tree)]


def _fields(tree: Any) -> Iterable[str]:
    """Field names of a named tuple or a dataclass."""
    if isinstance(tree, tuple):
        return getattr(tree, "_fields", ())
    is_dataclass = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    return [field.name for field in dataclasses.fields(tree)] if is_dataclass else ()


def is_array(tree: Any) -> bool:
    """Whether ``tree`` may have samples along a dim: a tensor, for one."""
    if isinstance(tree, (Tensor, np.ndarray, PackedSequence)):
        return True
    return not isinstance(tree, _PLAIN) and isinstance(getattr(tree, "batch_size", None), torch.Size)


def is_list(tree: Any) -> bool:
    """Whether ``tree`` may have one entry per sample: no named tuple, no size of a tensor."""
    return isinstance(tree, list) or type(tree) is tuple


def _is_flat(items: Any) -> bool:
    """Whether a list has no array and no container in it."""
    return not any(
        isinstance(item, (Tensor, np.ndarray, Mapping, list, tuple)) or hasattr(item, "__dataclass_fields__")
        for item in items
    )


def _attributes_of(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """Lists in the attributes of a mapping that are none of its items (``BatchEncoding`` of a tokenizer has some)."""
    if type(mapping) is dict or not hasattr(mapping, "__dict__"):
        return {}
    items = [id(value) for value in mapping.values()]
    return {
        name: value
        for name, value in vars(mapping).items()
        if is_list(value) and _is_flat(value) and id(value) not in items
    }


def rebuild_mapping(
    like: Any, items: dict[Any, Any], attribute: Callable[[str, Any], Any] = lambda name, value: value
) -> Any:
    """A mapping of the type of ``like`` with ``items``; its other attributes are mapped by ``attribute``."""
    if type(like) is dict:
        return items
    before = {key: like[key] for key in items if key in like}
    rebuilt = copy.copy(like)
    for key, value in items.items():
        rebuilt[key] = value
    if any(like[key] is not value for key, value in before.items()):
        # The copy shares its memory with the original, which is the user's own batch.
        for key, value in before.items():
            like[key] = value
        rebuilt = copy.deepcopy(like)
        for key, value in items.items():
            rebuilt[key] = value
    for name, value in _attributes_of(like).items():
        vars(rebuilt)[name] = attribute(name, value)
    return rebuilt


def refuse_other_sizes(known: BatchSource | None) -> None:
    """Refuse to split or join a batch whose parts have different numbers of samples.

    Raises:
        UnsupportedError: It is made of batches of several data loaders, with different sizes.
    """
    if known is not None and known.others:
        raise UnsupportedError(
            f"The batch is made of batches of {known.number} and {', '.join(map(str, known.others))} samples, by "
            "several data loaders, and cannot be divided by samples. Let the loaders have one batch size, or set "
            "`microbatches=1` (and `prescaled_batch=True`, its default)."
        )


def shown_path(path: Path) -> str:
    """``path`` in Python's notation: ``['boxes'][0]``, or ``.boxes[0]`` for a field."""
    parts = (str(key) if isinstance(key, str) and key.startswith(".") else f"[{key!r}]" for key in path)
    return "`batch" + "".join(parts) + "`"
