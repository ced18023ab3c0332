"""Splitting of a batch into microbatches.

The samples of a batch are spread as evenly as possible, larger microbatches first; :mod:`smp_strategy.model.samples`
finds them in the batch. Arrays are cut along their first dim, lists between their entries, and packed sequences by
sequences. Values without samples go whole to each microbatch: strings, numbers, tensors with a first dim of 1, which
broadcast, and objects. Each sample must be in exactly one microbatch, so an array of another length, or an object that
holds the samples, is refused with its path.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.samples import (
    BatchSource,
    Path,
    Samples,
    find_samples,
    is_array,
    is_list,
    length_of,
    refuse_other_sizes,
    shown_path,
    visited,
)

__all__ = ["holds_arrays", "sizes_of", "split"]


def sizes_of(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Numbers of samples per microbatch; a batch with fewer samples than microbatches gets fewer microbatches."""
    num = max(1, min(num_samples, num_microbatches))
    base, extra = divmod(num_samples, num)
    return tuple(base + (index < extra) for index in range(num))


def split(batch: Any, num_microbatches: int, known: BatchSource | None = None) -> tuple[list[Any], tuple[int, ...]]:
    """Split ``batch`` into microbatches by the rules of the module docstring.

    An object may split itself with a method ``smp_slice(num_microbatches, microbatch, axis)``.

    Args:
        batch: any nest of containers.
        num_microbatches: number of microbatches; a batch with fewer samples gets fewer.
        known: information of the data loader about the samples.

    Returns:
        The microbatches and their numbers of samples.

    Raises:
        UnsupportedError: an array has another number of samples, or an object holds samples in an unknown way.
    """
    samples = find_samples(batch, known)
    if samples.number is None and (num_microbatches == 1 or not _cuts_itself(batch)):
        return [batch], (1,)
    # An object that splits itself does not tell its number of samples: its parts are taken to be equal.
    sizes = (1,) * num_microbatches if samples.number is None else sizes_of(samples.number, num_microbatches)
    if len(sizes) == 1:
        return [batch], sizes if num_microbatches > 1 else (max(sizes[0], 1),)
    refuse_other_sizes(known)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cut = [
        _cut(batch, slice(start, start + size), samples, (len(sizes), index))
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return cut, sizes


def _cuts_itself(batch: Any) -> bool:
    found: list[bool] = []
    visited(batch, (), lambda path, leaf: found.append(hasattr(leaf, "smp_slice")))
    return any(found)


def _cut(batch: Any, part: slice, samples: Samples, position: tuple[int, int]) -> Any:
    def visit(path: Path, leaf: Any) -> Any:
        if hasattr(leaf, "smp_slice"):
            return leaf.smp_slice(*position, 0)
        if is_array(leaf):
            length = length_of(leaf)
            if length in (None, 1) and samples.number != 1:
                return leaf
            if length != samples.number:
                _refuse_length(path, leaf, samples)
            return _part(leaf, part)
        if path in samples.lists:
            return leaf[part]
        if _holds(leaf, samples.number):
            _refuse_object(path, leaf, samples)
        return list(leaf) if type(leaf) is list else leaf  # the step may change its own

    return visited(batch, samples.lists, visit)


def _part(array: Any, part: slice) -> Any:
    """A part of ``array``; parts of a tensor share its memory."""
    if isinstance(array, PackedSequence):
        return pack_sequence(unpack_sequence(array)[part], enforce_sorted=array.sorted_indices is None)
    if not isinstance(array, Tensor):
        return array[part]
    if array.is_nested:
        return torch.nested.as_nested_tensor(list(array.unbind()[part]), layout=array.layout)
    if array.layout != torch.strided:
        return array.index_select(0, torch.arange(part.start, part.stop, device=array.device))
    # `data` gives each microbatch a version counter of its own: an in-place change of one (ignored labels, say) must
    # not invalidate tensors that autograd keeps for another.
    return array[part] if array.requires_grad else array[part].data


def _holds(leaf: Any, number: int | None) -> bool:
    """Whether an object that cannot be cut holds samples: an array with one entry per sample, or their offsets."""
    if is_list(leaf):
        return any(_holds(item, number) for item in leaf)
    arrays = _arrays_in(leaf)
    if number is None or not arrays:
        return False
    counted = {getattr(leaf, name, None) for name in ("num_graphs", "batch_size")}
    is_told = any(count == number for count in counted) or any(_tells_sample(array, number) for array in arrays)
    return is_told or not {number, number + 1}.isdisjoint(map(length_of, arrays))


def holds_arrays(leaf: Any) -> bool:
    """Whether an object has tensors or other arrays in its attributes."""
    return bool(_arrays_in(leaf))


def _arrays_in(leaf: Any) -> list[Any]:
    attributes = getattr(leaf, "__dict__", None)
    if not attributes or isinstance(leaf, (type, torch.nn.Module)) or callable(leaf):
        return []
    found: list[Any] = []
    for value in _values_of(attributes):
        visited(value, (), lambda path, item: found.append(item) if is_array(item) else None)
    return found


def _tells_sample(array: Any, number: int) -> bool:
    """Whether ``array`` has the sample of each of its entries: 0, 0, 0, 1, 1, 2 ... up to the last one."""
    if not isinstance(array, Tensor) or array.ndim != 1 or not number > 1 or len(array) < number or array.is_meta:
        return False
    if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
        return False
    return torch.equal(array.unique_consecutive(), torch.arange(number, device=array.device, dtype=array.dtype))


def _values_of(attributes: dict[str, Any], depth: int = 3) -> list[Any]:
    """Attribute values of an object, and of objects in it."""
    found = list(attributes.values())
    for value in attributes.values() if depth else ():
        inner = getattr(value, "__dict__", None)
        if inner and not isinstance(value, (type, torch.nn.Module, Tensor, np.ndarray)) and not callable(value):
            found += _values_of(inner, depth - 1)
    return found


def _refuse_length(path: Path, leaf: Any, samples: Samples) -> None:
    what = f"has the shape {list(leaf.shape)}" if hasattr(leaf, "shape") else f"has {length_of(leaf)} samples"
    raise UnsupportedError(
        f"The batch cannot be cut into microbatches: it has {samples.number} samples ({shown_path(samples.witness)}), "
        f"but {shown_path(path)} {what}, a different number of samples. If it is not per sample, keep it in the module "
        "(as a buffer) or give it a first dim of 1; or set `microbatches=1`."
    )


def _refuse_object(path: Path, leaf: Any, samples: Samples) -> None:
    raise UnsupportedError(
        f"The batch cannot be cut into microbatches: {shown_path(path)} ({type(leaf).__name__}) is an object that "
        f"holds tensors of its {samples.number} samples ({shown_path(samples.witness)} is cut), and how to cut it is "
        "not known. Give the class a method `smp_slice(num_microbatches, microbatch, axis)` that returns the part of a "
        "microbatch, put the tensors into a dict, or set `microbatches=1`."
    )
