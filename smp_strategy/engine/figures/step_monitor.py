"""Monitor of a run: counts and traces of training steps, and what to do about gradients that are not finite.

The engine tells a monitor of its steps, if there is one; the times are those that every step records anyway. Ranks
exchange nothing before figures are asked for (:meth:`~smp_strategy.engine.figures.inspection.Inspection.figures`),
except the outcome of the search for NaN and infinity, once per update, unless these are ignored, and the times of steps
that are traced.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, final, get_args

import torch
from torch import Tensor

from smp_strategy.data_parallel.grad_norm import UnscaleResult
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.engine.figures.nonfinite import NonfinitePolicy, NonfiniteSearch, first_cause
from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.job import StepRun
from smp_strategy.pipeline.recording import Recorded, Recording
from smp_strategy.reports.run_figures import RankFigures
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["StepMonitor", "flops_of", "num_tokens"]

_IDS: Final = (torch.int32, torch.int64)


@final
class StepMonitor:
    """Counts of a rank.

    Args:
        nonfinite: what to do when gradients are not finite: ``raise`` an error that names the unit, stage and
            microbatch; ``skip`` the update with a warning that names them; ``ignore``: look for nothing.
        trace_steps: numbers of training steps, from 1, whose timeline is saved.
        clock: time in seconds.
        tell: called with warnings, on all ranks.

    Attributes:
        trace_folder: folder of ``step-<number>.json``; doors set it.
        num_nonfinite: updates so far for which gradients were not finite.

    Raises:
        ConfigError: ``nonfinite`` is another word.
    """

    def __init__(
        self,
        nonfinite: NonfinitePolicy = "raise",
        trace_steps: Collection[int] = (),
        *,
        clock: Callable[[], float] = perf_counter,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        if nonfinite not in get_args(NonfinitePolicy):
            words = ", ".join(f"`{word}`" for word in get_args(NonfinitePolicy))
            raise ConfigError(f"`nonfinite` of SMPMonitor must be one of {words}, but is {nonfinite!r}.")
        self.nonfinite = nonfinite
        self.trace_folder = Path()
        self.num_nonfinite = 0
        self._traced, self._due = frozenset(trace_steps), 0
        self._clock, self._tell = clock, tell
        self._search = NonfiniteSearch()
        self._counted = RankFigures(tokens=0)
        self._since: float | None = None
        self._flops: dict[int, float] = {}  # per sample, by the signature of the path
        self._is_checked = False
        self._sizes: Sequence[int] = ()  # of the microbatches of this step
        self._num_gathered = 0.0

    @property
    def searches(self) -> bool:
        """Whether NaN and infinity are looked for."""
        return self.nonfinite != "ignore"

    # Steps, as the engine tells of them

    def begin_step(self, number: int, microbatches: Sequence[Any], sizes: Sequence[int]) -> None:
        if self._since is None:
            self._since = self._clock()
        self._search.step, self._sizes = number, sizes
        self._due = number if number in self._traced else 0
        if self._is_checked:  # several optimizers may have been checked, with the same flags
            self._search.clear()
            self._is_checked = False
        before, tokens = self._counted, num_tokens(microbatches)
        self._counted = before._replace(
            steps=before.steps + 1,
            samples=before.samples + sum(sizes),
            tokens=None if tokens is None or before.tokens is None else before.tokens + tokens,
        )

    def interrupt(self) -> None:
        """Something else than training begins, and lasts until the next training step."""
        if self._since is not None:
            self._counted = self._counted._replace(seconds=self._counted.seconds + self._clock() - self._since)
            self._since = None

    def end_step(self, run: StepRun, recording: Recording) -> None:
        """Forward and backward of a training step are over."""
        if self.searches:
            self._search.add_losses(run.losses)
        known, signature = self._flops, run.trace.signature
        if signature not in known:
            known[signature] = flops_of(run.trace) / (self._sizes[0] or 1)
        before = self._counted
        self._counted = before._replace(
            flops=before.flops + known[signature] * sum(self._sizes),
            pass_seconds=before.pass_seconds + recording.seconds,
            idle_seconds=before.idle_seconds + recording.idle,
            message_seconds=before.message_seconds + recording.waited,
        )

    def save_trace(self, recorded: Recorded | None, gather: Callable[[], Timeline]) -> None:
        """Save the timeline of the step that is over, if it is to be traced. Collective over the replica then."""
        number, self._due = self._due, 0
        if recorded is not None and recorded.number == number:
            gather().save(self.trace_folder / f"step-{number}.json")
        elif number:
            self._tell(
                f"Training step {number}, which is in `trace_steps`, has no trace, because it ran without a timetable: "
                "so do the first step after a validation, and steps whose loss is computed or differentiated by hand. "
                "Choose a later step, or let the model return its loss."
            )

    def around_unit(self, unit: str, function: Callable[..., Any], microbatch: object) -> Callable[..., Any]:
        """``function``, the forward of ``unit`` for a microbatch; ``None``: outside of steps."""
        return self._search.around(unit, function, microbatch) if isinstance(microbatch, int) else function

    def check(self, found: UnscaleResult, stage_of: Mapping[str, int], *, is_scaled: bool) -> None:
        """Judge the gradients of all ranks before an update. Collective if they are not finite.

        Args:
            stage_of: Stage of each unit, in the order in which they run.
            is_scaled: Whether the loss was scaled, so that gradients may overflow and the scaler repairs it.

        Raises:
            SMPError: They are not finite, and ``nonfinite`` is ``raise``.
        """
        self._is_checked = True
        if not self.searches or found is not UnscaleResult.OVERFLOW:
            return
        everyones = collectives.gather_objects(self._search.found(), "what was not finite in which unit")
        records = [record for theirs in everyones for record in theirs]
        if is_scaled and not any(record.part == "loss" for record in records):
            return  # an ordinary overflow
        self.num_nonfinite += 1
        cause = first_cause(records, stage_of)
        if self.nonfinite == "raise":
            raise SMPError(
                f"Gradients are NaN or infinite. They come from {cause}. Look at this unit and at the samples, lower "
                "the learning rate, or clip gradients; `SMPMonitor(nonfinite='skip')` leaves out updates like this."
            )
        self._tell(f"An update is skipped: gradients are NaN or infinite. They come from {cause}.")

    # Figures

    def take(self, *, gathered: float, **more: Any) -> RankFigures:
        """Counts since the last time, which begin anew; the host has waited ``gathered`` seconds for weights so far."""
        is_training = self._since is not None
        self.interrupt()
        found = self._counted._replace(gather_seconds=gathered - self._num_gathered, **more)
        self._counted, self._num_gathered = RankFigures(tokens=0), gathered
        if is_training:
            self._since = self._clock()
        return found


def num_tokens(microbatches: Sequence[Any]) -> int | None:
    """Elements of the first integer tensor with two dimensions in each of ``microbatches`` (``input_ids``, say).

    ``None``: there is none.
    """
    total = 0
    for microbatch in microbatches:
        leaves = flatten(microbatch)[0]
        ids = (each for each in leaves if isinstance(each, Tensor) and each.dim() == 2 and each.dtype in _IDS)
        first = next(ids, None)
        if first is None:
            return None
        total += first.numel()
    return total


def flops_of(trace: Trace) -> float:
    """Floating-point operations of forward and backward of a microbatch."""
    return float(sum(each.flops for event in trace.events for each in event.effort))
