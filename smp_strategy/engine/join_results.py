"""Merging of the microbatches' results into one result, as a single process would return for the batch.

The rule depends on the kind of value, never on the values, so that all batches are treated alike:

- values with an entry per sample (a tensor's first dim, a list's length) are concatenated in the order of the samples;
- floating-point numbers are means, weighted by samples; integers are counts, which are added up;
- arguments of the step that it returns (the index of the batch) are unchanged;
- containers are merged item by item; a key that only some microbatches have is merged over these;
- other values (strings, objects) become one value if all are equal, else a list of the microbatches' values.

Truth values, and tensors without a dim of samples, can be merged in more than one way: unless they are equal and cannot
be counts, the result contains a :class:`NotJoined` in their place, which raises when it is used.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType, SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.samples import Path, are_alike, is_list, rebuild_mapping
from smp_strategy.model.trace.pytree import flatten, flatten_output, has_tensors, is_opened_value

__all__ = ["StepArgument", "NotJoined", "by_leaf", "given", "merge", "opened", "refuse_not_joined"]


class StepArgument(int):
    """Integer argument of a step, not a count of its samples. Arithmetic with it gives ordinary integers."""

    def __reduce__(self) -> Any:
        return int, (int(self),)


def given(value: Any) -> Any:
    """Mark ``value``, an argument of a step, so that it is recognised in the result."""
    return StepArgument(value) if type(value) is int else value


@final
class NotJoined:
    """Placeholder of a result that cannot be merged; raises on any use."""

    def __init__(self, where: str, why: str) -> None:
        self._message = (
            f"The step has returned {where} for each microbatch, and {why}: what it would be for the whole batch is "
            "not known. Return a number, or something with one entry per sample (a tensor of which that is the first "
            "dim, or a list); or set `microbatches=1`."
        )

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Raise the error, whatever the use."""
        raise UnsupportedError(self._message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by code that only inspects the object
            raise AttributeError(name)
        return self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        return found[0].refuse()

    def __repr__(self) -> str:
        return f"<not joined: {self._message}>"

    __hash__ = None  # type: ignore[assignment]
    __reduce_ex__ = refuse
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = __array__ = refuse
    __getitem__ = __call__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __neg__ = __abs__ = __and__ = __rand__ = __or__ = __ror__ = __invert__ = __matmul__ = __rmatmul__ = refuse


def merge(outputs: Sequence[Any], sizes: Sequence[int], path: Path = ()) -> Any:
    """Merge the results of the microbatches, at ``path`` in that of the step, by the rules of the module docstring."""
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    kind = type(first)
    if any(type(output) is not kind for output in outputs):
        is_number = all(isinstance(output, (int, float)) and not isinstance(output, bool) for output in outputs)
        return _mean(outputs, sizes) if is_number else list(outputs)
    if isinstance(first, (Tensor, np.ndarray, np.generic)):
        return _merge_arrays(outputs, sizes, path)
    if isinstance(first, Mapping):
        return rebuild_mapping(first, dict(_merge_items(outputs, sizes, path)))
    if isinstance(first, PackedSequence):
        sequences = [sequence for output in outputs for sequence in unpack_sequence(output)]
        lengths = [len(sequence) for sequence in sequences]
        is_sorted = first.sorted_indices is None and lengths == sorted(lengths, reverse=True)
        return pack_sequence(sequences, enforce_sorted=is_sorted)
    if isinstance(first, torch.Size):
        return _merge_shapes(outputs, sizes, path)
    if isinstance(first, (list, tuple)):
        return _merge_sequences(outputs, sizes, path)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        merged = {
            name: merge([getattr(output, name) for output in outputs], sizes, (*path, f".{name}")) for name in names
        }
        return dataclasses.replace(first, **merged)
    if isinstance(first, (Distribution, SimpleNamespace)) and has_tensors(first):
        return _merge_attributes(outputs, sizes, path)
    return _merge_values(outputs, sizes, path)


def opened(value: Any) -> tuple[list[Any], Any]:
    """Leaves of an argument or a result of a step, and its structure; packed sequences are leaves."""
    if isinstance(value, PackedSequence):
        return pytree.tree_flatten(value, lambda node: isinstance(node, PackedSequence))
    return flatten_output(value)


def by_leaf(outputs: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Join the results of the microbatches leaf by leaf; containers that differ between them count as leaves."""
    flat = [flatten(output, lambda node: type(node) is torch.Size, is_opened_value) for output in outputs]
    if any(structure != flat[0][1] for _, structure in flat):
        flat = [_contents(output) for output in outputs]
    structure = flat[0][1]
    if structure.is_leaf() or any(other != structure for _, other in flat):
        return join(outputs)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([by_leaf(leaves, join) for leaves in columns], structure)


def _contents(value: Any) -> tuple[list[Any], Any]:
    """Direct contents of a container."""
    return flatten(value, lambda node: node is not value)


def _merge_attributes(outputs: Sequence[Any], sizes: Sequence[int], path: Path) -> Any:
    """Objects that stand for their attributes; numbers there are settings, not counts."""
    merged = copy.copy(outputs[0])
    for name, first in vars(outputs[0]).items():
        found = [vars(output).get(name) for output in outputs]
        if isinstance(first, (bool, int, float, str, NoneType)):
            same = all(each == first for each in found)
            vars(merged)[name] = first if same else NotJoined(_named((*path, f".{name}"), first), "they differ")
        else:
            vars(merged)[name] = merge(found, sizes, (*path, f".{name}"))
    return merged


def refuse_not_joined(result: Any) -> Any:
    """Return ``result`` if all of it could be merged.

    Raises:
        UnsupportedError: it contains a :class:`NotJoined`.
    """
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, NotJoined):
            leaf.refuse()
    return result


def _merge_values(outputs: Sequence[Any], sizes: Sequence[int], path: Path) -> Any:
    first = outputs[0]
    if isinstance(first, bool):
        same = all(output is first for output in outputs)
        return first if same else NotJoined(_named(path, first), "these truth values differ")
    if isinstance(first, StepArgument):
        return int(first) if all(output == first for output in outputs) else list(outputs)
    if isinstance(first, int) and type(first) is int:
        return sum(outputs)
    if isinstance(first, (float, complex)):
        return _mean(outputs, sizes)
    return first if all(output is first or output == first for output in outputs) else list(outputs)


def _mean(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(output == outputs[0] for output in outputs):  # no rounding
        return outputs[0]
    return sum(output * size for output, size in zip(outputs, sizes, strict=True)) / sum(sizes)


def _merge_items(outputs: Sequence[Mapping[Any, Any]], sizes: Sequence[int], path: Path) -> Iterator[tuple[Any, Any]]:
    for key in dict.fromkeys(key for output in outputs for key in output):
        have = [(output[key], size) for output, size in zip(outputs, sizes, strict=True) if key in output]
        yield key, merge([value for value, _ in have], [size for _, size in have], (*path, key))


def _merge_arrays(outputs: Sequence[Any], sizes: Sequence[int], path: Path) -> Any:
    first = outputs[0]
    of_tensors = isinstance(first, Tensor)
    if of_tensors and first.is_nested:
        return torch.nested.as_nested_tensor([part for output in outputs for part in output], layout=first.layout)
    if all(output.ndim > 0 and len(output) == size for output, size in zip(outputs, sizes, strict=True)):
        if any(output.shape[1:] != first.shape[1:] for output in outputs):
            return NotJoined(_named(path, first), _shapes(outputs))
        return torch.cat(list(outputs)) if of_tensors else np.concatenate(outputs)
    is_whole = not (first.is_floating_point() or first.is_complex() if of_tensors else first.dtype.kind in "fc")
    is_bool = first.dtype == (torch.bool if of_tensors else np.bool_)
    if all(output.ndim == 0 for output in outputs) and not is_bool:
        if is_whole:
            total = sum(outputs[1:], start=first)
            return total.to(first.dtype) if of_tensors else total.astype(first.dtype)
        weighted = [output * (size / sum(sizes)) for output, size in zip(outputs, sizes, strict=True)]
        return torch.stack(weighted).sum() if of_tensors else sum(weighted)
    same = all(output.shape == first.shape and bool((output == first).all()) for output in outputs)
    # Equal numbers may be counts of each microbatch, unless they are zero.
    if same and (not is_whole or is_bool or not bool(first.any())):
        return first
    return NotJoined(_named(path, first), _why_not(outputs))


def _merge_shapes(outputs: Sequence[torch.Size], sizes: Sequence[int], path: Path) -> Any:
    first = outputs[0]
    if any(shape[1:] != first[1:] for shape in outputs):
        return NotJoined(_named(path, first), "they differ")
    if all(len(shape) and shape[0] == size for shape, size in zip(outputs, sizes, strict=True)):
        return torch.Size((sum(sizes), *first[1:]))
    return first if all(shape == first for shape in outputs) else NotJoined(_named(path, first), "they differ")


def _merge_sequences(outputs: Sequence[Any], sizes: Sequence[int], path: Path) -> Any:
    first = outputs[0]
    if _is_per_sample(outputs, sizes):
        return type(first)(item for output in outputs for item in output)
    if any(len(output) != len(first) for output in outputs):
        return list(outputs)
    columns = zip(*outputs, strict=True)
    items = [merge(list(column), sizes, (*path, place)) for place, column in enumerate(columns)]
    return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)


def _is_per_sample(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    if not is_list(outputs[0]) or any(len(output) != size for output, size in zip(outputs, sizes, strict=True)):
        return False
    items = [(item, size) for output, size in zip(outputs, sizes, strict=True) for item in output if item is not None]
    if isinstance(outputs[0], tuple) and any(_is_number(item) for item, _ in items):
        return False  # several results, not one of each sample
    # In a list, objects are rather those of one sample each, whatever their sizes.
    opens = isinstance(outputs[0], tuple)
    return are_alike([item for item, _ in items]) and not all(_has_all(item, size, opens) for item, size in items)


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, float, complex, np.generic)) or (isinstance(item, Tensor) and item.ndim == 0)


def _has_all(item: Any, size: int, opens: bool) -> bool:
    """Whether ``item`` by itself has an entry for each sample; ``opens``: also as an object with fields."""
    if isinstance(item, (Tensor, np.ndarray)):
        return item.ndim > 0 and len(item) == size
    if isinstance(item, Mapping):
        return bool(item) and all(_has_all(value, size, opens) for value in item.values())
    if opens and (hasattr(item, "_fields") or dataclasses.is_dataclass(item)):
        values = item if isinstance(item, tuple) else vars(item).values()
        return all(_has_all(value, size, opens) for value in values if not isinstance(value, (str, NoneType)))
    return is_list(item) and len(item) == size


def _named(path: Path, value: Any) -> str:
    name = f"{type(value).__name__} under {''.join(f'[{key!r}]' for key in path)}" if path else type(value).__name__
    return f"a {name}"


def _why_not(arrays: Sequence[Any]) -> str:
    if any(array.shape != arrays[0].shape for array in arrays):
        return _shapes(arrays)
    return "no dim of it stands for the samples" if arrays[0].ndim else "these truth values differ"


def _shapes(arrays: Sequence[Any]) -> str:
    return "their shapes differ (" + ", ".join(str(list(array.shape)) for array in arrays) + ")"
