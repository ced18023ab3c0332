"""Record of what a microbatch's program computes from its batch alone, so that it can be computed for the others.

Labels and masks are tensors that every stage has, and so are numbers that the step makes of them: how many labels are
not ignored, the sum of a mask. The weight of a term of the loss needs such a number of *all* microbatches, when most of
them have not come so far. So the operations of the first microbatch on its plain tensors are recorded, and those that
lead to the number are repeated with the tensors of another microbatch. They are few and cheap: a shift, a comparison.

Nothing is repeated that draws random numbers, or that is made of data out of sight (a list, an array of numpy).
In-place changes are repeated on copies.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smp_strategy.distributed.torch_private import mode_set_aside
from smp_strategy.model.samples import visited
from smp_strategy.model.trace.pytree import Path, items_of, nodes
from smp_strategy.model.trace.tensor_spec import METADATA
from smp_strategy.pipeline.batch_loss.batch_facts import RANDOM, Facts, facts_of, reduction_of
from smp_strategy.pipeline.placed_ops import is_in_place, operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["BatchRecord", "BatchValue", "OutOfSightError", "joined"]

_FROM_OUTSIDE = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack")
# Levels of nesting that are looked into; objects may hold each other.
_MOST_LEVELS = 6
_NUMBERS = ("item", "__int__", "__float__", "__index__")


class OutOfSightError(Exception):
    """A tensor cannot be computed for another microbatch."""


class BatchValue(NamedTuple):
    """A tensor of the batch, or one that was computed from it."""

    entry: int
    """Number of the entry that made it; -1: it is out of sight."""
    place: int | None
    """Number among the results of the entry, if there are several."""
    memory: int
    """Number of its memory, which views share."""
    facts: Facts

    @property
    def is_known(self) -> bool:
        """Whether it can be computed for other microbatches."""
        return self.entry >= 0 and self.facts.is_whole


@final
@dataclass(slots=True)
class _BatchStep:
    """A tensor of the batch, by its path, or an operation."""

    path: tuple[Any, ...] = ()
    function: Callable[..., Any] | None = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    inputs: list[BatchValue] = field(default_factory=list)
    reduction: str = ""
    """``"sum"`` or ``"mean"``, if it is one over all samples; ``"other"``, if it is another number for several."""


@final
class BatchRecord(TorchFunctionMode):
    """Records the operations on plain tensors of the program that runs in its context: that of the first microbatch,
    perhaps with a copy of it.
    """

    def __init__(self, microbatches: Sequence[Any], sizes: Sequence[int], copied: Any = None) -> None:
        super().__init__()
        # Not the microbatches themselves: steps replace what is in them.
        self._given, self._sizes = [_given(each) for each in microbatches], sizes
        # The first microbatch with other numbers in some rows, and whether with other labels.
        self._variants: list[tuple[Tensor, bool]] = []
        self._entries: list[_BatchStep] = []
        self._known: dict[int, tuple[Callable[[], Any], BatchValue]] = {}
        # Entries that have changed a memory.
        self._writes: dict[int, list[int]] = {}
        # Tensors of the microbatches before their programs have changed them.
        self._originals: dict[int, list[Tensor]] = {}
        self._num_memories = 0
        self._numbers: dict[float, BatchValue] = {}
        used = self._given[0] if copied is None else _given(copied)
        for path, leaf in self._given[0].items():
            self._entries.append(_BatchStep(path))
            self._remember(
                used[path], len(self._entries) - 1, None, self._new_memory(), self._facts_of_leaf(path, leaf)
            )

    def _facts_of_leaf(self, path: tuple[Any, ...], leaf: Any) -> Facts:
        if not isinstance(leaf, (Tensor, np.ndarray)) or getattr(leaf, "is_nested", False) or leaf.ndim == 0:
            return Facts(is_whole=False)
        # A tensor that was cut shares its memory with the next part; one of a list of samples does not.
        following = self._given[1].get(path)
        is_cut = len(leaf) == self._sizes[0] and following is not None and _memory_of(leaf) == _memory_of(following)
        return Facts(dim=0 if is_cut else None, is_whole=is_cut)

    # Recording

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and is_in_place(operation_name(func)):
            self._keep_original(args[0])
        result = func(*args, **kwargs)
        if func not in METADATA and type(result) is not PlacedTensor:
            self._note(func, args, kwargs, result)
        return result

    def add_variant(self, rows: Tensor, *, changes_labels: bool = False) -> int:
        """Add the first microbatch with other numbers in ``rows``, and perhaps with other labels; its number for
        :meth:`value`.
        """
        self._variants.append((rows, changes_labels))
        return len(self._given) + len(self._variants) - 1

    def _varied(self, path: tuple[Any, ...], rows: Tensor, *, changes_labels: bool) -> Any:
        leaf = self._at(0, path)
        if not isinstance(leaf, Tensor) or self._facts_of_leaf(path, leaf).dim is None:
            return leaf
        if leaf.is_floating_point():  # zeros stay zeros: they may be a mask
            others = leaf * (torch.arange(leaf.numel(), device=leaf.device).view_as(leaf).cos() * 0.25 + 0.7).to(leaf)
        else:
            others = leaf.roll(1, 0) if changes_labels else leaf
        return torch.where(rows.to(leaf.device).view(-1, *[1] * (leaf.ndim - 1)), others, leaf)

    @property
    def num_samples(self) -> int:
        """Number of samples in the first microbatch."""
        return self._sizes[0]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context in which nothing is recorded: code of units, and of this package."""
        with mode_set_aside(self):
            yield

    def find(self, value: Any) -> BatchValue | None:
        """What is known of ``value``, a tensor or a number read from one; ``None``: it is not of the batch."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._numbers.get(value)
        found = self._known.get(id(value))
        return found[1] if found is not None and found[0]() is value else None

    def _remember(self, value: Any, entry: int, place: int | None, memory: int, facts: Facts) -> None:
        # Lists have no weak references; those of the microbatch live as long as it.
        held = (lambda: value) if isinstance(value, list) else weakref.ref(value)
        self._known[id(value)] = (held, BatchValue(entry, place, memory, facts))

    def _keep_original(self, changed: Any) -> None:
        """Before ``changed`` is changed in place: keep the tensors of the batch whose memory it shares.

        Those of all microbatches: programs of others may come to this change before their tensors are asked for.
        """
        found = self.find(changed)
        for held, leaf in () if found is None else tuple(self._known.values()):
            is_leaf = leaf.entry >= 0 and self._entries[leaf.entry].function is None
            if found is None or not is_leaf or leaf.memory != found.memory or not isinstance(held(), Tensor):
                continue
            path, numbers = self._entries[leaf.entry].path, len(self._given) + len(self._variants)
            if leaf.entry not in self._originals:
                self._originals[leaf.entry] = [self._at(number, path).clone() for number in range(numbers)]

    def _at(self, microbatch: int, path: tuple[Any, ...]) -> Any:
        if microbatch >= len(self._given):
            rows, changes_labels = self._variants[microbatch - len(self._given)]
            return self._varied(path, rows, changes_labels=changes_labels)
        if path not in self._given[microbatch]:
            raise OutOfSightError
        return self._given[microbatch][path]

    def _new_memory(self) -> int:
        self._num_memories += 1
        return self._num_memories

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, inputs = operation_name(func), list[tuple[Any, BatchValue]]()
        is_placed = False
        for leaf in _arguments(args, kwargs):
            is_placed = is_placed or type(leaf) is PlacedTensor
            found = self.find(leaf) if not isinstance(leaf, (int, float)) else None
            if found is not None:
                inputs.append((leaf, found))
        if name in _NUMBERS and inputs and isinstance(result, (int, float)) and abs(result) > 1:
            self._numbers[float(result)] = inputs[0][1]
            return
        outputs = result if isinstance(result, (tuple, list)) else [result]
        tensors = [(place, each) for place, each in enumerate(outputs) if isinstance(each, Tensor)]
        writes = inputs[0] if inputs and is_in_place(name) and args and inputs[0][0] is args[0] else None
        hidden = is_placed or name in RANDOM or any(each.entry < 0 for _, each in inputs)
        if not inputs:
            hidden = hidden or (name in _FROM_OUTSIDE and not isinstance(args[0], (int, float)))
        if not hidden and not inputs:
            return  # a constant
        number = -1 if hidden else len(self._entries)
        if not hidden:
            given_args, given_kwargs = _replaced((args, kwargs), self.find)
            is_scalar = isinstance(result, Tensor) and result.ndim == 0
            is_of_many = is_scalar and any(isinstance(leaf, Tensor) and leaf.ndim for leaf, _ in inputs)
            kind = (reduction_of(name) or ("other" if is_of_many else "")) if is_scalar else ""
            self._entries.append(_BatchStep((), func, given_args, given_kwargs, [each for _, each in inputs], kind))
        if writes is not None:
            self._writes.setdefault(writes[1].memory, []).append(number)
        given = [(leaf, each.facts) for leaf, each in inputs if isinstance(leaf, Tensor)]
        for place, each in tensors:
            if writes is not None and each is args[0]:
                continue
            shared = [found for leaf, found in inputs if _memory_of(leaf) == _memory_of(each)]
            memory = shared[0].memory if shared else self._new_memory()
            facts = facts_of(name, args, kwargs, given, each) if given else Facts()
            self._remember(each, number, None if each is result else place, memory, facts)

    # Repeating

    def value(self, wanted: BatchValue, microbatch: int, known: Mapping[int, Tensor] | None = None) -> Any:
        """Compute ``wanted`` for another microbatch; ``known`` are results of entries that are given.

        Raises:
            OutOfSightError: the program has made it of something that is not known here.
        """
        results: dict[int, Any] = dict(known or {})
        for number in sorted(self._needed(wanted, results)):
            entry = self._entries[number]
            if entry.function is None:
                kept = self._originals.get(number)
                results[number] = kept[microbatch].clone() if kept else self._at(microbatch, entry.path)
            else:
                args, kwargs = _replaced((entry.args, entry.kwargs), lambda each: _chosen(results, each))
                results[number] = entry.function(*args, **kwargs)
        return _chosen(results, wanted)

    def has_totals(self, wanted: BatchValue) -> bool:
        """Whether nothing but sums and means over samples goes into ``wanted``: :meth:`totals` has all of it."""
        return all(self._entries[number].reduction != "other" for number in self._needed(wanted, {}))

    def _needed(self, wanted: BatchValue, known: Mapping[int, Any]) -> set[int]:
        """Entries that have to be repeated for ``wanted``, in-place changes before its use included."""
        needed, waiting = set[int](), [(wanted, len(self._entries))]
        while waiting:
            each, limit = waiting.pop()
            for number in (each.entry, *(write for write in self._writes.get(each.memory, ()) if write < limit)):
                if number < 0:
                    raise OutOfSightError
                if number not in needed and number not in known:
                    needed.add(number)
                    waiting += [(found, number) for found in self._entries[number].inputs]
        return needed

    def totals(self, wanted: BatchValue) -> dict[int, Tensor]:
        """Values for the batch, by entry, of the sums and means over samples that go into ``wanted``.

        Raises:
            OutOfSightError: some of them cannot be computed.
        """
        found: dict[int, Tensor] = {}
        shares = [size / sum(self._sizes) for size in self._sizes]
        for number in sorted(self._needed(wanted, {})):
            kind = self._entries[number].reduction
            if kind not in ("sum", "mean"):
                continue
            made = BatchValue(number, None, -1, Facts())
            parts = [self.value(made, each, found) for each in range(len(self._sizes))]
            weights = [1.0] * len(parts) if kind == "sum" else shares
            total = sum(part.double() * weight for part, weight in zip(parts, weights, strict=True))
            found[number] = torch.as_tensor(total).to(parts[0].dtype)
        return found


def joined(microbatches: Sequence[Any], sizes: Sequence[int], least: int) -> tuple[Any, int]:
    """The first of the ``microbatches``, together with the next ones if it has fewer than ``least`` samples; and its
    number of samples.
    """
    number = next((each for each in range(1, len(sizes)) if sum(sizes[:each]) >= least), len(sizes))
    found: dict[tuple[Any, ...], list[Any]] = {}
    for each in microbatches[:number]:
        visited(each, (), lambda path, leaf: found.setdefault(path, []).append(leaf))

    def join(path: tuple[Any, ...], leaf: Any) -> Any:
        parts = found[path]
        # A tensor that was cut shares its memory with the next part; one that all have is the same.
        is_array = isinstance(leaf, (Tensor, np.ndarray)) and all(isinstance(each, type(leaf)) for each in parts)
        if not is_array or len({_memory_of(each) for each in parts}) > 1 or _address(parts[-1]) == _address(leaf):
            return leaf
        return torch.cat(parts) if isinstance(leaf, Tensor) else np.concatenate(parts)

    return visited(microbatches[0], (), join) if number > 1 else microbatches[0], sum(sizes[:number])


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else int(value.ctypes.data)


def _memory_of(value: Any) -> Any:
    """Something equal for tensors, or arrays, that share memory."""
    if isinstance(value, np.ndarray):
        return id(value) if value.base is None else id(value.base)
    try:
        return value.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # nested, sparse, or under a transform
        return id(value)


def _given(microbatch: Any) -> dict[Path, Any]:
    """Tensors, arrays and lists in a microbatch by their paths."""
    found = nodes(microbatch, _opened, levels=_MOST_LEVELS)
    return {path: node for path, node in found if isinstance(node, (Tensor, np.ndarray, list))}


def _opened(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, (Mapping, list, tuple)):
        return () if isinstance(node, (list, tuple)) and _has_numbers(node) else items_of(node)
    if isinstance(node, (Tensor, np.ndarray, type, torch.nn.Module)) or callable(node):
        return ()
    return getattr(node, "__dict__", {}).items()


def _has_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], (int, float, str, bytes))


def _arguments(args: Any, kwargs: Any) -> Iterator[Any]:
    def opened(node: Any) -> Iterable[tuple[Any, Any]]:
        return enumerate(node) if isinstance(node, (tuple, list)) and not _has_numbers(node) else ()

    return (node for each in (*args, *kwargs.values()) for _, node in nodes(each, opened))


def _replaced(tree: Any, find: Callable[[Any], Any]) -> Any:
    """``tree`` with each argument replaced by what ``find`` returns for it, unless that is ``None``."""
    found = find(tree) if not isinstance(tree, (int, float)) else None
    if found is not None:
        return found
    if type(tree) is dict:
        return {key: _replaced(each, find) for key, each in tree.items()}
    if type(tree) in (tuple, list) and not _has_numbers(tree):
        return type(tree)(_replaced(each, find) for each in tree)
    return tree


def _chosen(results: Mapping[int, Any], each: Any) -> Any:
    if not isinstance(each, BatchValue):
        return None
    found = results[each.entry]
    return found if each.place is None else found[each.place]
