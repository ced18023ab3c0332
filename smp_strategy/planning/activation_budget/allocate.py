"""How a stage that has too little memory gets by: which of its units keep less for backward, and what that costs.

The step is simulated as if all units kept everything. Where that is too much, the moments at which the stage is full
are those of its plan, and :mod:`smp_strategy.planning.activation_budget.knapsack` finds the choice for its units that
takes the least time and fits at all of them. Units that take longer may change the plan, so the step is simulated
again; what is too full then joins the moments. All of it is a function of plain data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple, final

from smp_strategy.activations.policy import ActivationPolicy, Recompute, Treatments
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.activation_budget.call_costs import call_costs, treated
from smp_strategy.planning.activation_budget.knapsack import Alternative, MemoryBudget, MemoryUse, Selection, choose
from smp_strategy.planning.schedule.flow import Flow, KeptBytes, route
from smp_strategy.planning.schedule.peak_memory import (
    DEFAULT_HORIZON,
    ActionMemory,
    moments,
    peak_saved_bytes,
    used_bytes,
)

__all__ = ["CallTable", "Microbatch", "ActivationPlan", "SimulatedStep", "relieve"]

# Times that a step is simulated anew, because other moments are the fullest.
MOST_ROUNDS = 8


@final
@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """What becomes of what units would keep for backward: what is decided, and what may be."""

    machine: Machine
    """Models the part of a forward that is done again, and copies to the host."""
    fixed: Treatments = field(default_factory=dict)
    """Of units; others keep everything, or are free."""
    free: frozenset[str] = frozenset()
    """Units for which the best is chosen."""
    may_offload: bool = False
    """Whether that may be host memory."""
    may_keep_products: bool = True
    """Whether a unit may keep the results of its products and compute only the rest again."""
    preserve_rng_state: bool = True
    """Whether what is computed again draws the same random numbers."""
    min_bytes: int = 0
    """What is smaller stays on the device."""
    horizon: int = DEFAULT_HORIZON
    """How far ahead of its use something comes back from there."""

    @property
    def choices(self) -> tuple[ActivationPolicy, ...]:
        """For units that are free; the first is preferred where it does not matter."""
        again: tuple[Recompute, ...] = ("no", "cheap", "all") if self.may_keep_products else ("no", "all")
        ways = product((False, True) if self.may_offload else (False,), again)
        return tuple(
            ActivationPolicy(recompute=recompute, offload=offload, preserve_rng_state=self.preserve_rng_state)
            for offload, recompute in ways
        )

    def taking(self, treatments: Treatments) -> "ActivationPlan":
        """The same, where ``treatments`` are those of units that are free otherwise."""
        taken = {name: treatment for name, treatment in treatments.items() if name in self.free}
        return replace(self, fixed={**self.fixed, **taken}, free=self.free.difference(taken))

    def treated(
        self, trace: Trace, work: Mapping[int, Work], treatments: Treatments, stage_of: Mapping[str, int]
    ) -> tuple[Trace, dict[int, Work]]:
        """Events and their work under ``treatments``."""
        return treated(trace, work, treatments, stage_of, machine=self.machine, min_bytes=self.min_bytes)

    def least_kept(self, trace: Trace, work: Mapping[int, Work]) -> tuple[Trace, dict[int, Work]]:
        """Events with the least bytes and the least work that may become of them: bounds, and no candidate."""
        trace, work = self.treated(trace, work, self.fixed, {})
        events = [
            event._replace(
                saved_bytes=min(
                    call_costs(event, choice, Work(), self.machine, self.min_bytes).saved_bytes
                    for choice in self.choices
                )
            )
            if event.kind == "unit" and event.name in self.free
            else event
            for event in trace.events
        ]
        return replace(trace, events=events), dict(work)

    def flow(self, microbatch: "Microbatch", treatments: Treatments) -> Flow:
        """The segment graph under ``treatments``."""
        stage_of = microbatch.stage_of
        trace, work = self.treated(microbatch.trace, microbatch.work, treatments, stage_of)
        return self._with_copies(route(trace, stage_of, microbatch.num_stages, work).at_speeds(microbatch.speeds))

    def _with_copies(self, flow: Flow) -> Flow:
        """``flow``, where a pass takes as long as its copies at least."""
        if not self.machine.host.is_beside or not any(call.offloaded for calls in flow.kept.values() for call in calls):
            return flow
        longer = {}
        for segment, work in flow.work.items():
            seconds = sum(call.offloaded for call in flow.kept[segment]) / self.machine.host.bytes_per_second
            back = work.input_gradient + max(0.0, seconds - work.backward)
            longer[segment] = Work(max(work.forward, seconds), back, work.weight_gradient)
        return replace(flow, work=longer)


@final
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What is simulated: a microbatch on stages."""

    trace: Trace
    work: Mapping[int, Work]
    stage_of: Mapping[str, int]
    num_stages: int
    speeds: Sequence[float] = ()
    """Of the stages; empty: all are alike."""


@final
class CallTable:
    """What every call costs under every choice, and what was chosen: asked again for each candidate of a partition.

    Args:
        relief: what may become of what units keep.
        trace: a microbatch.
        work: of its events.
    """

    def __init__(self, relief: ActivationPlan, trace: Trace, work: Mapping[int, Work]) -> None:
        self.costs = {
            position: [
                call_costs(event, choice, work.get(position, Work()), relief.machine, relief.min_bytes)
                for choice in relief.choices
            ]
            for position, event in enumerate(trace.events)
            if event.kind == "unit" and event.name in relief.free
        }
        self._verdicts: dict[object, Selection | None] = {}

    def choose(self, units: Sequence[Sequence[Alternative]], stock: MemoryBudget) -> Selection | None:
        """See :func:`smp_strategy.planning.activation_budget.knapsack.choose`."""
        key = (tuple(map(tuple, units)), stock)
        if key not in self._verdicts:
            self._verdicts[key] = choose(units, stock)
        return self._verdicts[key]


class SimulatedStep(NamedTuple):
    """A simulated step."""

    plan: Plan
    peaks: tuple[int, ...]
    """Bytes that each stage keeps for backward at most."""
    treatments: Treatments
    """Of all units that do not keep everything."""


def relieve(
    relief: ActivationPlan,
    microbatch: Microbatch,
    room: Sequence[int | None],
    simulate: Callable[[Flow], Plan],
    table: CallTable | None = None,
) -> SimulatedStep:
    """The fastest step that fits; if nothing is found that does, one that keeps as little as it can.

    Args:
        relief: what may become of what units keep.
        microbatch: what is simulated.
        room: bytes for activations on each stage; ``None``: any number.
        simulate: orders the work of a step.
        table: of the calls, if there is one already.
    """
    search = _Search(relief, microbatch, room, simulate, table)
    found = search.simulated(relief.fixed)
    if not relief.free or search.fits(found):
        return found
    treatments = dict(relief.fixed)
    for _ in range(MOST_ROUNDS):
        for stage in search.too_full(found):
            treatments = {**treatments, **search.chosen(stage, found)}
        found = search.simulated(treatments)
        if search.fits(found) or not search.has_hope:
            break
    return found


@final
class _Search:
    """For one partition. Arguments as for :func:`relieve`."""

    def __init__(
        self,
        relief: ActivationPlan,
        microbatch: Microbatch,
        room: Sequence[int | None],
        simulate: Callable[[Flow], Plan],
        table: CallTable | None,
    ) -> None:
        self._relief = relief
        self._microbatch = microbatch
        self._room = room
        self._simulate = simulate
        self._known: list[list[ActionMemory]] = [[] for _ in room]
        # What the estimate of the choice lacks where units are called several times, or differ much.
        self._missing = [0] * len(room)
        self._flow: Flow | None = None
        self._table = table
        self.has_hope = True

    def simulated(self, treatments: Treatments) -> SimulatedStep:
        """A step under ``treatments``."""
        flow = self._flow = self._relief.flow(self._microbatch, treatments)
        plan = self._simulate(flow)
        used = {name: treatment for name, treatment in treatments.items() if not treatment.is_default}
        return SimulatedStep(plan, peak_saved_bytes(plan, flow, self._relief.horizon), used)

    def fits(self, found: SimulatedStep) -> bool:
        """Whether no stage is too full."""
        return not self.too_full(found)

    def too_full(self, found: SimulatedStep) -> list[int]:
        """Stages that are."""
        both = enumerate(zip(found.peaks, self._room, strict=True))
        return [stage for stage, (peak, most) in both if most is not None and peak > most]

    def chosen(self, stage: int, found: SimulatedStep) -> dict[str, ActivationPolicy]:
        """What the units of ``stage`` do, so that it fits also at the moments of this plan."""
        room = self._room[stage]
        assert room is not None
        assert self._flow is not None
        known = self._known[stage]
        self._missing[stage] += max([0, *(used_bytes(moment, self._flow) - room for moment in known)])
        for moment in moments(found.plan, self._flow, self._relief.horizon)[stage]:
            if not any(other.covers(moment) for other in known):
                known[:] = [*(other for other in known if not moment.covers(other)), moment]
        units = self._alternatives(stage, known)
        stock = self._stock(stage, max(0, room - self._missing[stage]), len(known))
        verdict = self._calls.choose([each for _, each in units], stock)
        self.has_hope = self.has_hope and verdict is not None
        chosen = [_least(each) for _, each in units] if verdict is None else verdict.chosen
        choices = self._relief.choices
        return {name: choices[number] for (name, _), number in zip(units, chosen, strict=True) if name}

    def _stock(self, stage: int, most: int, num_moments: int) -> MemoryBudget:
        host = self._relief.machine.host
        if not host.is_beside or not self._relief.may_offload:
            return MemoryBudget(most_bytes=(most,) * num_moments)
        # What a microbatch computes anyway, forward and backward.
        assert self._flow is not None
        mine = self._microbatch
        calls = [call for segment, calls in self._flow.kept.items() if segment.stage == stage for call in calls]
        work = [mine.work.get(call.position, Work()) for call in calls]
        seconds = min(sum(each.forward for each in work), sum(each.backward for each in work))
        return MemoryBudget(
            most_bytes=(most,) * num_moments,
            hidden_bytes=seconds * host.bytes_per_second,
            bytes_per_second=host.bytes_per_second,
        )

    def _alternatives(self, stage: int, known: Sequence[ActionMemory]) -> list[tuple[str, list[Alternative]]]:
        """For each unit on ``stage`` that is free, in the order of the program, and without a name for everything
        else, what could become of it."""
        assert self._flow is not None
        segments = sorted(segment for segment in self._flow.kept if segment.stage == stage)
        calls: dict[object, list[tuple[SegmentId, KeptBytes]]] = {}
        for segment in segments:
            for call in self._flow.kept[segment]:
                is_free = call.position in self._calls.costs
                calls.setdefault(call.name if is_free else call.position, []).append((segment, call))
        found = []
        for key, mine in calls.items():
            if isinstance(key, str):
                ways = range(len(self._relief.choices))
                found.append((key, [self._alternative(mine, known, number) for number in ways]))
            else:
                found.append(("", [Alternative(0.0, tuple(_load(mine, moment) for moment in known))]))
        return found

    def _alternative(
        self, calls: Sequence[tuple[SegmentId, KeptBytes]], known: Sequence[ActionMemory], number: int
    ) -> Alternative:
        """What it comes to if the calls of a unit do what ``number`` of the choices says."""
        costs = [self._calls.costs[call.position][number] for _, call in calls]
        kept = [
            (segment, KeptBytes(call.name, each.saved_bytes, each.again_bytes, each.offloaded_bytes))
            for (segment, call), each in zip(calls, costs, strict=True)
        ]
        return Alternative(
            sum(each.again_seconds + 2 * each.copy_seconds for each in costs),
            tuple(_load(kept, moment) for moment in known),
            sum(each.offloaded_bytes for each in costs) if self._relief.machine.host.is_beside else 0,
        )

    @property
    def _calls(self) -> CallTable:
        if self._table is None:
            self._table = CallTable(self._relief, self._microbatch.trace, self._microbatch.work)
        return self._table


def _load(calls: Sequence[tuple[SegmentId, KeptBytes]], moment: ActionMemory) -> MemoryUse:
    """What calls of a unit add to a moment."""
    around = before = during = 0
    for segment, call in calls:
        around += moment.kept.get(segment, 0) * call.saved
        around += moment.near.get(segment, 0) * call.offloaded
        running = moment.running
        if running is not None and running.segment == segment:
            before += call.saved * running.frees
            during = max(during, call.again * running.recomputes + running.window * call.offloaded)
    return MemoryUse(around, before, during)


def _least(alternatives: Sequence[Alternative]) -> int:
    """The one that leaves the fewest bytes. While a unit's own backward runs all are alike."""

    def left(number: int) -> tuple[int, int]:
        loads = alternatives[number].loads
        return sum(load.around + load.before for load in loads), sum(load.during for load in loads)

    return min(range(len(alternatives)), key=left)
