"""Steps that carry state from one microbatch to the next are found by rehearsing them.

A running sum, a mean or a count that sets a factor is state that a microbatch leaves and the next one finds. Before the
first step of each kind some microbatches run dry: one after the other, as in one process, and then, for each stage, in
turns that are as short as the stage's messages allow. If calls get other values, or places hold other values in the
end, microbatches depend on each other, and the step runs by a
:class:`~smp_strategy.pipeline.microbatch_order.TurnRule`.

Nearly all steps leave tensors only, and are rehearsed once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from smp_strategy.engine.dry_run import DryRunInput, undone
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.pipeline.job import Job, Step
from smp_strategy.pipeline.microbatch_order import TurnRule, gate_position
from smp_strategy.pipeline.microbatch_state import MicrobatchState
from smp_strategy.pipeline.rehearsal import EndlessError, Rehearsal
from smp_strategy.pipeline.routing import Placement
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.surveys import rehearse
from smp_strategy.pipeline.switches import SwitchPlace

__all__ = ["Rehearsals"]

# Some steps look at what several microbatches have left.
_MOST_MICROBATCHES = 4
# No stage waits for a message there.
_NO_STAGE = -1
# Names of no interest to the user: of the mapping that holds a module's buffers, and of containers without a name.
_UNNAMED = frozenset({"_buffers", "list", "set", "deque"})


class _RehearsalOutcome(NamedTuple):
    """What came out of a rehearsal."""

    noted: Mapping[tuple[int, int, int, tuple[int, ...]], Any]
    """See :attr:`Rehearsal.noted <smp_strategy.pipeline.rehearsal.Rehearsal>`."""
    events: list[tuple[Event, Placement]]
    """Of the last microbatch."""
    state: Mapping[SwitchPlace, Any]
    """What places hold in the end."""
    left: Sequence[SwitchPlace]
    """Places that hold something else than before, with their keys."""


@final
@dataclass(frozen=True, kw_only=True)
class Rehearsals:
    """Of one kind of step. All ranks of a replica come to the same result."""

    step: Step
    """The user's code."""
    microbatch: Any
    """What it gets."""
    surroundings: DryRunInput
    """What it runs on."""
    stage_of: Mapping[str, int]
    """Stage of each unit, by name."""
    num_stages: int
    """Of the pipeline."""
    private_state: Callable[[], MicrobatchState]
    """Makes what keeps microbatches apart."""

    def turn_rule(self) -> TurnRule | None:
        """The rule for the step; ``None``: microbatches are independent, or the step cannot run without values."""
        for truth in (False, True):
            # The step is the user's code, and the values that it reads are made up: it may raise anything.
            try:
                ordered = self._rehearse(truth, in_order=True)
                self.surroundings.calls.switches.rehearse(ordered.left)
                return self._rule(truth, ordered) if ordered.left else None
            except EndlessError:
                return None
            except Exception:
                continue
        return None

    def _rule(self, truth: bool, ordered: _RehearsalOutcome) -> TurnRule | None:
        different = self._differences(truth, ordered, None)
        if different:
            # Times, and random numbers from elsewhere, are others each time.
            different -= _difference(ordered, self._rehearse(truth, in_order=True))
        if not different:
            return None
        names = dict.fromkeys(place.name for place in ordered.left if isinstance(place.name, str))
        gate = gate_position(ordered.events)
        is_enough = gate is not None and not self._differences(truth, ordered, gate) & different
        return TurnRule(
            gate if is_enough else None,
            Trace([event for event, _ in ordered.events]).names,
            tuple(name for name in names if name not in _UNNAMED),
        )

    def _differences(self, truth: bool, ordered: _RehearsalOutcome, gate: int | None) -> set[Any]:
        """Values that are not those of ``ordered``, on any stage, if microbatches take turns up to ``gate``."""
        found = set[Any]()
        for stage in range(self.num_stages):
            try:
                other = self._rehearse(truth, stage, gate=gate)
            except (Exception, EndlessError):  # in order there was none
                return {*ordered.noted, *ordered.state}
            found |= _difference(ordered, other, stage)
        return found

    def _rehearse(
        self, truth: bool, stage: int = _NO_STAGE, *, in_order: bool = False, gate: int | None = None
    ) -> _RehearsalOutcome:
        """Rehearse once, by ``MicrobatchRunner.rehearse``."""
        surroundings, calls = self.surroundings, self.surroundings.calls
        rehearsal, private = Rehearsal(stage, truth=truth), self.private_state()
        dry = Stage(
            number=-1,
            stage_of=self.stage_of,
            num_stages=self.num_stages,
            oracle=surroundings.oracle,
            transport=None,
            device=surroundings.device,
            rehearsal=rehearsal,
            replicas=surroundings.replicas,
        )
        number = min(surroundings.num_microbatches, _MOST_MICROBATCHES)
        microbatches = [copy.deepcopy(self.microbatch) for _ in range(number)]
        before, runtime = calls.runtime, Runtime(dry, private)
        calls.runtime = runtime
        try:
            with undone(self.step, surroundings, computes=False), calls.switches.learning_nothing():
                private.begin(self.step)
                found = private.found()
                events = rehearse(runtime, Job(step=self.step, seed=0, gate=gate), microbatches, in_order=in_order)
                state = private.found()
                left = private.with_keys(place for place, value in state.items() if found.get(place) != value)
                return _RehearsalOutcome(rehearsal.noted, events, state, left)
        finally:
            runtime.close()
            calls.runtime = before


def _difference(one: _RehearsalOutcome, other: _RehearsalOutcome, stage: int | None = None) -> set[Any]:
    """Keys of values that differ; of those that calls got, the ones on ``stage``, or on any."""

    def seen(outcome: _RehearsalOutcome) -> dict[Any, Any]:
        noted = outcome.noted.items()
        # The names of events are the same on all stages: each runs the whole program.
        here = {key: value for key, value in noted if stage is None or stage in key[3] or key[2] < 0}
        return {**here, **outcome.state}

    mine, theirs = seen(one), seen(other)
    missing = object()
    return {key for key in mine | theirs if mine.get(key, missing) != theirs.get(key, missing)}
