"""Cutting a batch into microbatches, and putting results together again.

The samples of a batch are spread as evenly as possible, larger microbatches first. A mean over the batch is the mean
over its microbatches weighted by their sizes, also when they are uneven.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError

__all__ = ["merge", "num_samples", "rebuilt", "sizes_of", "split"]


def sizes_of(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Samples per microbatch; a batch with fewer samples than microbatches gets fewer microbatches."""
    num = max(1, min(num_samples, num_microbatches))
    base, extra = divmod(num_samples, num)
    return tuple(base + (index < extra) for index in range(num))


def split(batch: Any, num_microbatches: int) -> tuple[list[Any], tuple[int, ...]]:
    """Cut ``batch`` along dim 0 of its tensors.

    Tensors with a dim 0 are cut; lists of as many strings, numbers or other objects as there are samples are cut,
    too, and so are lists of as many dicts as the tensors beside them have samples (the boxes of each image, say);
    everything else is given whole to each microbatch. An object that is none of these may cut itself with a method
    ``smp_slice(num_microbatches, microbatch, axis)``.

    Returns:
        The microbatches and their numbers of samples.

    Raises:
        UnsupportedError: two tensors disagree on the number of samples.
    """
    if num_microbatches == 1:
        return [batch], (max(num_samples(batch, strict=False) or 1, 1),)
    samples = num_samples(batch)
    if samples is None and not _cuts_itself(batch):
        return [batch], (1,)
    # How many samples an object holds that cuts itself is not known: its parts are taken to be equal.
    sizes = (1,) * num_microbatches if samples is None else sizes_of(samples, num_microbatches)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cut = [
        _cut(batch, slice(start, start + size), samples, (len(sizes), index))
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return cut, sizes


def merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Make one result of the results of the microbatches.

    Tensors with one entry per sample are concatenated, as are lists with one item per sample; tensors without a dim
    are averaged, weighted by ``sizes`` (floating point) or must be equal; containers are merged item by item;
    anything else must be equal. What fits none of this becomes a list over the microbatches.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        return list(outputs)
    if isinstance(first, Tensor):
        return _merge_tensors(outputs, sizes)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        return _rebuild_mapping(first, {key: merge([output[key] for output in outputs], sizes) for key in first})
    if isinstance(first, (list, tuple)):
        return _merge_sequences(outputs, sizes)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{name: merge([getattr(output, name) for output in outputs], sizes) for name in names}
        )
    return first if all(output == first for output in outputs) else list(outputs)


def _merge_tensors(outputs: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    if all(output.ndim > 0 and len(output) == size for output, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    if all(output.ndim == 0 for output in outputs) and outputs[0].is_floating_point():
        return torch.stack([output * (size / sum(sizes)) for output, size in zip(outputs, sizes, strict=True)]).sum()
    same = all(output.shape == outputs[0].shape and torch.equal(output, outputs[0]) for output in outputs)
    return outputs[0] if same else list(outputs)


def _merge_sequences(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    per_sample = all(len(output) == size for output, size in zip(outputs, sizes, strict=True))
    if isinstance(first, list) and per_sample and not any(isinstance(item, Tensor) and item.ndim for item in first):
        return [item for output in outputs for item in output]
    if any(len(output) != len(first) for output in outputs):
        return list(outputs)
    items = [merge(list(column), sizes) for column in zip(*outputs, strict=True)]
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def rebuilt(batch: Any, visit: Callable[[Any], Any]) -> Any:
    """``batch`` with its leaves visited: tensors, lists with one item per sample, and what is no container."""
    beside, _ = _dims(batch, _holds_mappings)
    return _walk(batch, visit, lambda items: _holds_mappings(items) and len(items) in beside)


def num_samples(batch: Any, *, strict: bool = True) -> int | None:
    """Samples in the batch, by the first tensor if not ``strict``; ``None`` if nothing in it can be cut."""
    beside, _ = _dims(batch, _holds_mappings)
    dims, lists = _dims(batch, lambda items: _holds_mappings(items) and len(items) in beside)
    if len(dims) > 1 and strict:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in dims.values())
        raise UnsupportedError(
            f"The batch holds tensors with different numbers of samples (dim 0 of shapes {shapes}), so it cannot be "
            "cut into microbatches. Keep tensors that are not per sample in the module (as buffers), or set "
            "`microbatches=1`."
        )
    if dims:
        return next(iter(dims))
    return lists[0] if lists else None


def _dims(batch: Any, is_per_sample: Callable[[list[Any]], bool]) -> tuple[dict[int, Tensor], list[int]]:
    """The sizes of dim 0, each with a tensor that has it, and the lengths of the lists that are leaves."""
    dims: dict[int, Tensor] = {}
    lists: list[int] = []

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            dims.setdefault(leaf.size(0), leaf)
        elif isinstance(leaf, list):
            lists.append(len(leaf))
        return leaf

    _walk(batch, visit, is_per_sample)
    return dims, lists


def _holds_mappings(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, Mapping) for item in items)


def _cuts_itself(batch: Any) -> bool:
    found: list[bool] = []
    _walk(batch, lambda leaf: found.append(hasattr(leaf, "smp_slice")))
    return any(found)


def _cut(batch: Any, part: slice, samples: int | None, position: tuple[int, int]) -> Any:
    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _part(leaf, part) if leaf.ndim else leaf
        if isinstance(leaf, list):
            return leaf[part] if len(leaf) == samples else leaf
        if hasattr(leaf, "smp_slice"):
            return leaf.smp_slice(*position, 0)
        return leaf

    return rebuilt(batch, visit)


def _part(tensor: Tensor, part: slice) -> Tensor:
    """A part of ``tensor`` in the same memory."""
    # `data` gives each microbatch a version counter of its own: what one changes in place (ignored labels, say) must
    # not invalidate what autograd keeps of another.
    return tensor[part] if tensor.requires_grad else tensor[part].data


def _walk(tree: Any, visit: Callable[[Any], Any], is_leaf: Callable[[list[Any]], bool] = lambda items: False) -> Any:
    """Rebuild ``tree`` with its leaves visited; a list is a leaf if it ``is_leaf`` or holds no tensor or container."""
    if isinstance(tree, Tensor):  # most are, and the questions below take longer
        return visit(tree)
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {key: _walk(value, visit, is_leaf) for key, value in tree.items()})
    if isinstance(tree, tuple):
        items = [_walk(item, visit, is_leaf) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    holds_containers = isinstance(tree, list) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in tree)
    if holds_containers and not is_leaf(tree):
        return [_walk(item, visit, is_leaf) for item in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        rebuilt = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(rebuilt, field.name, _walk(getattr(tree, field.name), visit, is_leaf))
        return rebuilt
    return visit(tree)


def _rebuild_mapping(like: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the type of ``like``, with its other attributes, but with ``items``."""
    if type(like) is dict:
        return items
    before = {key: like[key] for key in items}
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
    return rebuilt
