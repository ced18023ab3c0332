"""Weights of the terms of a loss in the microbatches of a step, so that the loss is that of the whole batch.

While the first microbatch's program runs, a :class:`~smp_strategy.pipeline.batch_loss.batch_record.BatchRecord` follows
what it computes from its batch, and calls that are terms (:mod:`smp_strategy.pipeline.batch_loss.loss_terms`) are noted
by their position in the program. The stage that runs a term computes its count for all microbatches at that moment,
before any backward: labels and masks are on every stage. The others do nothing, so stages need not agree on anything.

A term is replaced by one whose weighted mean over the microbatches is that of the batch. So everything that follows
from it is right as well: the loss, its parts, and what the step logs of them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord, OutOfSightError
from smp_strategy.pipeline.batch_loss.loss_terms import (
    Divisor,
    MeanOver,
    Problem,
    Selected,
    Term,
    as_sum,
    selection_by,
    term_of,
)
from smp_strategy.pipeline.batch_loss.varying_counts import VaryingCounts
from smp_strategy.pipeline.placed_ops import calling_line, operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["LossWeights", "ProgramTerms"]


@final
class LossWeights:
    """Terms of the losses of one step, and their weights.

    Args:
        applies: whether terms that this stage runs get their weights; others still know them as terms.
        tells: whether problems are of interest.
        compares: whether counts of calls that are no terms are compared between microbatches.

    Attributes:
        counts: these counts.
        problems: calls whose counts are not known, as sentences.
        is_wrong: whether a count was another one than expected.
    """

    def __init__(
        self,
        microbatches: Sequence[Any],
        sizes: Sequence[int],
        *,
        applies: bool = True,
        tells: bool = True,
        compares: bool = False,
    ) -> None:
        self._applies, self.tells = applies, tells
        self.problems: dict[str, None] = {}
        self.is_wrong = False
        self.sizes = sizes
        self.record = BatchRecord(microbatches, sizes)  # of the first microbatch
        self.counts = VaryingCounts(self.record, sizes) if compares else None
        # By position in the program.
        self._terms: dict[int, tuple[Callable[..., Any], _WeightedTerm]] = {}

    def program(self, number: int) -> "ProgramTerms":
        """Terms of a microbatch's program."""
        return ProgramTerms(self, number)

    def begin(self, position: int, function: Callable[..., Any], term: Term) -> None:
        """Note a term of the first microbatch's program."""
        made = _WeightedMean if isinstance(term, MeanOver) else _WeightedDivisor
        self._terms[position] = (function, made(self, term))  # type: ignore[arg-type]

    @property
    def has_terms(self) -> bool:
        """Whether there are terms; the same on all stages."""
        return bool(self._terms)

    def close(self) -> None:
        """Break the reference cycle with the terms at the end of the step."""
        self._terms.clear()

    def weighted(self, position: int, function: Callable[..., Any], number: int) -> Callable[..., Any] | None:
        """What runs instead of ``function`` at a position of a program, if it is a term."""
        found = self._terms.get(position)
        if found is None or found[0] is not function:
            return None
        return functools.partial(found[1].run, number, function) if self._applies else function

    def note(self, problem: Problem, line: str = "") -> None:
        """Note a call whose count is not known."""
        self.problems[f"`{problem.call}`{line}: {problem.reason}"] = None


@final
class ProgramTerms:
    """Terms of one microbatch's program."""

    def __init__(self, step: LossWeights, number: int) -> None:
        self._step = step
        self._number = number
        self._selections: dict[int, Selected] = {}
        self._has_terms = False

    def recorded(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``step``, which is recorded in the first microbatch."""

        def run(microbatch: Any) -> Any:
            with self._step.record:
                return step(microbatch)

        return step if self._number else run

    def call(
        self, interpret: Callable[..., Any], position: int, kind: str, name: str, callee: Callee, args: Any, kwargs: Any
    ) -> Any:
        """Let ``interpret`` make a call of the program, with the weight of a term if it is one."""
        if self._number:
            return self._follow(interpret, position, kind, name, callee, args, kwargs)
        function, counts = callee.function, self._step.counts
        with self._step.record.set_aside():
            if kind != "op":
                result = interpret(kind, name, callee, args, kwargs)
            else:
                is_known = self._look(position, function, args, kwargs)
                if counts is not None and not is_known:
                    counts.note(position, function, args, kwargs)
                weighted = self._step.weighted(position, function, 0)
                result = interpret(kind, name, replace(callee, compiled=weighted), args, kwargs)
                if isinstance(result, PlacedTensor):
                    self._mark(result, args, kwargs, is_term=weighted is not None)
                    self._note_selection(function, args, kwargs, result)
            if counts is not None:
                counts.follow(function, args, kwargs, leaves_of(result))
        return result

    def _follow(
        self, interpret: Callable[..., Any], position: int, kind: str, name: str, callee: Callee, args: Any, kwargs: Any
    ) -> Any:
        """Make a call of a later microbatch, whose terms are where the first one has them."""
        weighted = self._step.weighted(position, callee.function, self._number) if kind == "op" else None
        if weighted is not None:
            self._has_terms = True
            callee = replace(callee, compiled=weighted)
        elif kind == "op":
            self._compare(position, callee.function, args, kwargs)
        result = interpret(kind, name, callee, args, kwargs)
        if self._has_terms and kind == "op" and isinstance(result, PlacedTensor):
            self._mark(result, args, kwargs, is_term=weighted is not None)
        return result

    def _compare(self, position: int, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Compare the count of a call of a later microbatch with that of the first."""
        counts = self._step.counts
        if counts is not None and counts.differ(position, self._number, function, args, kwargs):
            self._step.note(Problem(operation_name(function), _DIFFERS), calling_line())

    def _look(self, position: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Find out whether a call of the first microbatch is a term, or should be one."""
        found = term_of(function, args, kwargs, self._step.record, self._selections)
        if found is None:
            return False
        if not isinstance(found, Problem):
            self._step.begin(position, function, found)
        elif self._step.tells and any(each.spec.requires_grad for each in _placed(args, kwargs)):
            self._step.note(found, calling_line())
        return True

    def _mark(self, result: PlacedTensor, args: Sequence[Any], kwargs: dict[str, Any], *, is_term: bool) -> None:
        """Note whether a term with a weight has gone into a result."""
        result.is_weighted = is_term or any(each.is_weighted for each in _placed(args, kwargs))

    def _note_selection(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: PlacedTensor
    ) -> None:
        """Note how the elements of a result were selected, by this call or before it."""
        selected = selection_by(function, args, kwargs, self._step.record)
        if selected is None and self._selections and result.ndim:
            before = [(each, self._selections.get(each.value.id)) for each in _placed(args, kwargs)]
            selected = next((s for each, s in before if s and each.ndim and each.shape[0] == result.shape[0]), None)
        if selected is not None:
            self._selections[result.value.id] = selected


def _placed(args: Sequence[Any], kwargs: dict[str, Any]) -> list[PlacedTensor]:
    return [each for each in leaves_of((args, kwargs)) if isinstance(each, PlacedTensor)]


class _WeightedMean:
    """A mean over elements of which the batch tells the number."""

    def __init__(self, step: LossWeights, term: MeanOver) -> None:
        self._step, self._record, self._sizes, self._term = step, step.record, step.sizes, term
        self._counts: list[float] | None = None
        # What the real call measures, per count; zero: unknown.
        self._per_count = 0.0

    def run(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the term in a microbatch."""
        if self._counts is None:
            self._counts = self._count(function, args, kwargs)
        count, total = self._counts[number], sum(self._counts)
        if number and self._per_count and not self._is_as_expected(number, args, kwargs):
            self._step.is_wrong = True
            self._step.note(Problem(operation_name(function), _CHANGED))
        # In this order: exact for integers.
        share = count * sum(self._sizes), total * self._sizes[number]
        if share[0] == share[1]:
            return function(*args, **kwargs)
        if not count:
            return as_sum(function, args, kwargs)
        return function(*args, **kwargs) * (share[0] / share[1])

    def _count(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[float]:
        """Counts in all microbatches, or their sizes if these are not known."""
        try:
            with torch.no_grad():
                counts = [self._term.count_in(self._record, each) for each in range(len(self._sizes))]
                if isinstance(counts[0], Tensor):  # all of them by one look at the device
                    counts = torch.stack([count.double() for count in counts]).tolist()
                if counts[0]:
                    self._per_count = float(self._term.measured(args, kwargs)) / counts[0]
                return [float(each) for each in counts]
        except _FAILED:
            self._step.note(Problem(operation_name(function), _FAILS))
            return [float(size) for size in self._sizes]

    def _is_as_expected(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        assert self._counts is not None
        tensor = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if not tensor.is_cpu:  # looking would wait for the device
            return True
        with torch.no_grad():
            found = float(self._term.measured(args, kwargs))
        return abs(found - self._counts[number] * self._per_count) <= 1e-5 * max(found, 1.0)


class _WeightedDivisor:
    """A number of the whole batch by which a sum or a mean is divided, or multiplied."""

    def __init__(self, step: LossWeights, term: Divisor) -> None:
        self._step, self._record, self._sizes, self._term = step, step.record, step.sizes, term
        self._totals: dict[int, Tensor] | None = None
        self._has_failed = False

    def run(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the term in a microbatch."""
        place = self._term.place
        given, other = args[place], args[1 - place]
        changed = self._fair(number, given)
        if changed is None:
            return function(*args, **kwargs)
        if not isinstance(given, Tensor):
            value: Any = changed.item()
        elif given.is_floating_point():
            value = changed.to(given.dtype)
        else:
            value = changed.to(other.dtype if isinstance(other, Tensor) else torch.get_default_dtype())
        if torch.equal(torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(given, dtype=torch.float64)):
            return function(*args, **kwargs)
        return function(*args[:place], value, *args[place + 1 :], **kwargs)

    def _fair(self, number: int, given: Any) -> Tensor | None:
        """Fair share of a microbatch in the number of the batch; ``None``: it is not known."""
        if self._has_failed:
            return None
        try:
            with torch.no_grad():
                if self._totals is None:
                    self._totals = self._record.totals(self._term.value)
                if number and not self._is_as_expected(number, given):
                    raise OutOfSightError
                value = self._record.value(self._term.value, number, self._totals)
        except _FAILED:
            self._has_failed = self._step.is_wrong = True
            self._step.note(Problem("the division by a sum over the batch", _FAILS))
            return None
        degree = self._term.value.facts.degree
        made: Tensor = torch.as_tensor(value).double() * self._sizes[number] ** degree / sum(self._sizes) ** degree
        return made

    def _is_as_expected(self, number: int, given: Any) -> bool:
        if isinstance(given, Tensor) and not given.is_cpu:
            return True
        expected = torch.as_tensor(self._record.value(self._term.value, number)).double()
        found = torch.as_tensor(given).double()
        if not isinstance(given, Tensor) and expected <= 1 == given:  # `max(number, 1)`
            return True
        return expected.shape == found.shape and torch.allclose(expected, found, rtol=1e-5, equal_nan=True)


_WeightedTerm = _WeightedMean | _WeightedDivisor
# What repeating code of the user on another microbatch may end with.
_FAILED = (OutOfSightError, RuntimeError, LookupError, TypeError, ValueError)
_FAILS = "its count cannot be computed for the other microbatches"
_DIFFERS = "its count is another one in each microbatch"
_CHANGED = "its count in a microbatch is another one than the batch has told"
