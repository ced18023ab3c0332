"""Watches the glue of a dry run for a loss that compares samples of its batch.

Such a loss (contrastive losses with negatives in the batch, correlations over the batch, prototypes) is another one in
a microbatch, which has fewer samples to compare, and none at all if it has one. Nothing but the glue can do so: units
are taken to keep samples apart (norms of a batch have a note of their own). Which operation it is follows from where
the samples are in each tensor: :mod:`smp_strategy.pipeline.batch_loss.sample_spread`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord
from smp_strategy.pipeline.batch_loss.sample_spread import Mixing, Spread, spread_of, unit_spread_of
from smp_strategy.pipeline.placed_ops import calling_line, operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["SampleWatch"]


class _Found(NamedTuple):
    """An operation that computes with several samples at once."""

    value: int
    """Number of its result."""
    text: str


@final
class SampleWatch:
    """Follows the samples of a microbatch through the calls of its program.

    Attributes:
        record: records the program in its context.
        comparison: operation on the way to the loss that computes with several samples at once, as text; empty: there
            is none.
    """

    def __init__(self, record: BatchRecord) -> None:
        self.comparison = ""
        self.record = record
        self._spreads: dict[int, Spread] = {}
        self._found: list[_Found] = []

    def call(
        self, interpret: Callable[..., Any], position: int, kind: str, name: str, callee: Callee, args: Any, kwargs: Any
    ) -> Any:
        """Let ``interpret`` make a call of the program, and follow the samples; see ``ProgramTerms.call``."""
        with self.record.set_aside():
            # Before the call, which may change its arguments in place.
            before = [(each, spread) for each in leaves_of((args, kwargs)) if (spread := self._of(each)) is not None]
            result = interpret(kind, name, callee, args, kwargs)
            for number, each in enumerate(leaves_of(result) if before else ()):
                if isinstance(each, PlacedTensor):
                    self._follow(kind, callee, args, kwargs, each, before, number)
        return result

    def _follow(
        self,
        kind: str,
        callee: Callee,
        args: Any,
        kwargs: Any,
        made: PlacedTensor,
        before: Sequence[tuple[Tensor, Spread]],
        number: int,
    ) -> None:
        if kind != "op":
            spread = unit_spread_of(made, before)
        else:
            known = {id(tensor): each for tensor, each in before}
            name = operation_name(callee.function)
            try:
                spread = spread_of(name, args, kwargs, made, lambda each: known.get(id(each)), number)
            except Mixing as mixing:
                where = mixing.origin or f"`{name}`{calling_line()}"
                self._found.append(_Found(made.value.id, f"{where} {mixing.what}"))
                spread = None
            if spread is not None and spread.mixed == "pairs" and not spread.origin:
                spread = replace(spread, origin=f"`{name}`{calling_line()}")
        self._spreads.pop(made.value.id, None)
        if spread is not None:
            self._spreads[made.value.id] = spread

    def _of(self, value: Any) -> Spread | None:
        if isinstance(value, PlacedTensor):
            return self._spreads.get(value.value.id)
        found = self.record.find(value) if isinstance(value, Tensor) else None
        if found is None or (dim := found.facts.dim) is None:
            return None
        num = self.record.num_samples
        return Spread(frozenset({dim}), num=num, order="" if value.shape[dim] == num else None)

    def end(self, trace: Trace, losses: Sequence[Any]) -> None:
        """After the program: find out what has led to its loss, or to other ``losses`` of a backward."""
        leading = {loss.value.id for loss in losses if isinstance(loss, PlacedTensor)}
        leading |= set[int]() if trace.loss is None else {trace.loss}
        for event in reversed(trace.events):
            if any(value.id in leading for value in event.outputs):
                leading |= {value.id for value in event.inputs}
        self.comparison = next((found.text for found in self._found if found.value in leading), "")
