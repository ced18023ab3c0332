"""Does it matter that microbatches take turns? A step is rehearsed, to see how far they may.

A microbatch may find what the one before it has left: a running sum, a mean, a count that sets a factor. In one process
that one has ended. So before the first step of each kind some microbatches run dry, one after the other, and then, for
each stage, in turns that are as short as its messages allow. If what they give to calls, or leave in the end, is not
the same, the step runs by a rule (:mod:`smp_strategy.pipeline.turn_rules`).

Steps that leave nothing but tensors, which nearly all do, are rehearsed once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from smp_strategy.dry_run import Surroundings, untouched
from smp_strategy.pipeline.private_state import PrivateState
from smp_strategy.pipeline.rehearsal import EndlessError, Rehearsal
from smp_strategy.pipeline.rng import seeded
from smp_strategy.pipeline.routing import Placement
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.switches import SwitchPlace
from smp_strategy.pipeline.turn_rules import TurnRule, gate_position
from smp_strategy.pipeline.turns import Job, Step
from smp_strategy.trace.events import Event, Trace
from smp_strategy.trace.variables import variables_restored

__all__ = ["find_turn_rule"]

# Some steps look at what several have left.
_MOST_MICROBATCHES = 4
# What the contents of places stand under that have no names, and where modules keep their buffers.
_CONTAINERS = frozenset({"list", "set", "deque", "_buffers"})


def find_turn_rule(
    step: Step,
    microbatch: Any,
    surroundings: Surroundings,
    *,
    stage_of: Mapping[str, int],
    num_stages: int,
    keeper: Callable[[], PrivateState],
) -> TurnRule | None:
    """How microbatches may take turns.

    Args:
        step: the user's code.
        microbatch: what it gets.
        surroundings: what it runs on.
        stage_of: stage of each unit, by name.
        num_stages: of the pipeline.
        keeper: makes what keeps microbatches apart.

    Returns:
        The rule; ``None``: as they like, or it cannot be told, because the step does not run without values.
    """
    for truth in (False, True):
        rehearsals = _Rehearsals(step, microbatch, surroundings, stage_of, num_stages, keeper, truth)
        # The step is the user's code, and the values that it reads are made up: it may raise anything.
        try:
            ordered = rehearsals.run(-1, in_order=True)
            surroundings.calls.switches.rehearse(ordered.left)
            return rehearsals.rule(ordered) if ordered.left else None
        except EndlessError:
            return None
        except Exception:
            continue
    return None


class _Outcome(NamedTuple):
    """What came out of a rehearsal."""

    rehearsal: Rehearsal
    events: list[tuple[Event, Placement]]
    state: Mapping[SwitchPlace, Any]
    left: Sequence[SwitchPlace]
    """Places in which there is something else than before, with their keys."""

    def seen_by(self, stage: int) -> dict[Any, Any]:
        """All that can be compared, as ``stage`` sees it."""
        return {**self.rehearsal.seen_by(stage), **self.state}


@final
class _Rehearsals:
    """Of one step; see :func:`find_turn_rule`, and :class:`Rehearsal` for ``truth``."""

    def __init__(
        self,
        step: Step,
        microbatch: Any,
        surroundings: Surroundings,
        stage_of: Mapping[str, int],
        num_stages: int,
        keeper: Callable[[], PrivateState],
        truth: bool,
    ) -> None:
        self._step = step
        self._microbatch = microbatch
        self._surroundings = surroundings
        self._num_microbatches = min(surroundings.num_microbatches, _MOST_MICROBATCHES)
        self._stage_of = stage_of
        self._num_stages = num_stages
        self._keeper = keeper
        self._truth = truth

    def rule(self, ordered: _Outcome) -> TurnRule | None:
        """The rule for a step that leaves ``ordered`` when microbatches run one after the other."""
        different = self._difference(ordered, None)
        # Times, and numbers of generators that are nobody's, differ anyway.
        different -= self._changed(ordered, self.run(-1, in_order=True), -1) if different else set()
        if not different:
            return None
        named = [place.name for place in ordered.left if isinstance(place.name, str)]
        names = tuple(dict.fromkeys(name for name in named if name not in _CONTAINERS))
        path = Trace([event for event, _ in ordered.events]).names
        gate = gate_position(ordered.events)
        is_enough = gate is not None and not self._difference(ordered, gate) & different
        return TurnRule(gate if is_enough else None, path, names)

    def _difference(self, ordered: _Outcome, gate: int | None) -> set[Any]:
        """Where short turns, up to ``gate``, lead to something else on any stage."""
        found = set[Any]()
        for stage in range(self._num_stages):
            try:
                other = self.run(stage, in_order=False, gate=gate)
            except (Exception, EndlessError):  # of the user's code, or a refusal: in order there was none
                return set(ordered.seen_by(stage))
            found |= self._changed(ordered, other, stage)
        return found

    def _changed(self, ordered: _Outcome, other: _Outcome, stage: int) -> set[Any]:
        one, two = ordered.seen_by(stage), other.seen_by(stage)
        return {key for key in one.keys() | two.keys() if key not in one or key not in two or one[key] != two[key]}

    def run(self, stage: int, *, in_order: bool, gate: int | None = None) -> _Outcome:
        """Rehearse once; see :meth:`~smp_strategy.pipeline.turns.Turns.rehearse`."""
        module, units, calls = self._surroundings.module, self._surroundings.units, self._surroundings.calls
        rehearsal, device = Rehearsal(stage, truth=self._truth), self._surroundings.device
        dry = Stage(
            number=-1,
            stage_of=self._stage_of,
            num_stages=self._num_stages,
            oracle=self._surroundings.oracle,
            transport=None,
            device=device,
            rehearsal=rehearsal,
            replicas=self._surroundings.replicas,
        )
        private = self._keeper()
        microbatches = [copy.deepcopy(self._microbatch) for _ in range(self._num_microbatches)]
        runtime_before, runtime = calls.runtime, Runtime(dry, private)
        calls.runtime = runtime
        try:
            with (
                seeded(0, device),
                untouched(module, units, computes=False),
                variables_restored(module.modules(), self._step),
                calls.switches.learning_nothing(),
            ):
                private.begin(self._step)
                before = private.found()
                events = runtime.rehearse(Job(step=self._step, seed=0, gate=gate), microbatches, in_order=in_order)
                state = private.found()
                left = private.with_keys(place for place, value in state.items() if before.get(place) != value)
                return _Outcome(rehearsal, events, state, left)
        finally:
            runtime.close()
            calls.runtime = runtime_before
