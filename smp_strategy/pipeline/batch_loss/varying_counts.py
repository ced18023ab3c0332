"""Finds counts in a loss that differ between microbatches although nothing of the batch tells them.

A mean over rows that were cut to their lengths and joined, or over a packed sequence, has its count in the shape of its
argument; ``loss.sum() / len(mask.nonzero())`` has it in a number. Neither can be known of the other microbatches before
their programs have run, so the loss is weighted by samples. The user has to know: the same call of two programs has
counts that do not go with their numbers of samples.

A value of a single sample (a row of the batch, whose mean is over its own length) has counts of its own, which is
right. So the glue's rows are followed until they meet others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord
from smp_strategy.pipeline.batch_loss.loss_terms import PRODUCTS, QUOTIENTS, is_mean
from smp_strategy.pipeline.placed_ops import operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["VaryingCounts"]

_ROWS = ("unbind", "__iter__", "split", "split_with_sizes", "chunk", "tensor_split")


class _Count(NamedTuple):
    """Count of a call in the first microbatch."""

    function: Callable[..., Any]
    number: float


@final
class VaryingCounts:
    """Counts of the calls of the first microbatch by position, for comparison with those of others.

    Args:
        record: of the first microbatch.
        sizes: numbers of samples of the microbatches.
    """

    def __init__(self, record: BatchRecord, sizes: Sequence[int]) -> None:
        self._record, self._sizes = record, sizes
        self._counts: dict[int, _Count] = {}
        # Which sample a value is of, by its number; of the first microbatch.
        self._rows: dict[int, object] = {}

    def note(self, position: int, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note the count of a call of the first microbatch, if it has one."""
        number = _count(function, args, kwargs)
        if number is not None and self._row_of(_placed(args, kwargs)) is None:
            self._counts[position] = _Count(function, number)

    def follow(self, function: Callable[..., Any], args: Any, kwargs: Any, made: Sequence[Any]) -> None:
        """Follow single samples through a call of the first microbatch."""
        name, placed = operation_name(function), _placed(args, kwargs)
        row = self._row_of(placed)
        if row is None and not placed and any(map(self._is_of_one, leaves_of((args, kwargs)))):
            row = object()
        for number, each in enumerate(made):
            if isinstance(each, PlacedTensor):
                taken = row if row is not None else _taken(name, args, kwargs, number)
                self._rows.pop(each.value.id, None)
                if taken is not None:
                    self._rows[each.value.id] = taken

    def _row_of(self, placed: Sequence[PlacedTensor]) -> object:
        """The sample of which the ``placed`` tensors are; ``None``: of several."""
        rows = {self._rows[each.value.id] for each in placed if each.value.id in self._rows}
        return rows.pop() if len(rows) == 1 else None

    def _is_of_one(self, leaf: Any) -> bool:
        found = self._record.find(leaf) if isinstance(leaf, Tensor) else None
        return found is not None and not found.facts.is_whole

    def differ(self, position: int, microbatch: int, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether a call of a later microbatch has another count than the first, and not by its number of samples."""
        first = self._counts.get(position)
        if first is None or first.function is not function:
            return False
        number = _count(function, args, kwargs)
        shares = self._sizes[microbatch], self._sizes[0]
        return number is not None and number != first.number and number * shares[1] != first.number * shares[0]


def _placed(args: Any, kwargs: Any) -> list[PlacedTensor]:
    return [each for each in leaves_of((args, kwargs)) if isinstance(each, PlacedTensor)]


def _count(function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> float | None:
    """Number over which a call takes a mean of a tensor that trains, or by which it divides one; ``None``: none."""
    training = [each for each in _placed(args, kwargs) if each.spec.requires_grad]
    if not training:
        return None
    if is_mean(function, args, kwargs):
        return training[0].numel() if len(args) < 2 or not isinstance(args[1], (int, tuple, list)) else None
    name = operation_name(function)
    is_quotient = name in QUOTIENTS
    if not is_quotient and name not in PRODUCTS:
        return None
    given = next((_number(each) for each in args[1 if is_quotient else 0 : 2] if _number(each) is not None), None)
    if not given:
        return None
    count = given if is_quotient else 1 / given
    return round(count) if count >= 1 and abs(count - round(count)) < 1e-6 * count else None


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    # Looking at a number on another device would wait for it.
    is_number = isinstance(value, Tensor) and not isinstance(value, PlacedTensor) and not value.ndim and value.is_cpu
    return float(value) if is_number else None


def _taken(name: str, args: Sequence[Any], kwargs: Any, number: int) -> object:
    """Which sample an operation takes out of the batch, if it takes one."""
    if name in _ROWS:
        return number
    index = args[1] if len(args) > 1 else None
    if name == "__getitem__":
        index = index[0] if isinstance(index, tuple) and index else index
        return index if type(index) is int else None
    return kwargs.get("index", args[2] if len(args) > 2 else None) if name == "select" and not index else None
