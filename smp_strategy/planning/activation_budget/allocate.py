"""Selective recomputation and offload: chooses which units of a stage drop activations to fit the memory limit.

The step is simulated with all units keeping everything. If a stage exceeds its limit, the fullest moments of its plan
become constraints, and :mod:`smp_strategy.planning.activation_budget.knapsack` finds the fastest choice for its units
that satisfies all of them. Units that take longer may change the plan, so the step is simulated again, and moments that
exceed the limit then are added to the constraints. All functions work on plain data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple, final

from smp_strategy.activations.policy import ActivationPolicies, ActivationPolicy, Recompute
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
    Peak,
    moments,
    peaks,
    used_bytes,
)

__all__ = ["CallTable", "Microbatch", "ActivationPlan", "SimulatedStep", "relieve"]

# Most simulations of a step: each may add moments to the constraints.
MOST_ROUNDS = 8


@final
@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """Recomputation and offload of activations: fixed choices per unit, and the range of the free ones."""

    machine: Machine
    """Performance model for recomputation and copies to the host."""
    fixed: ActivationPolicies = field(default_factory=dict)
    """Fixed choices by unit; other units keep everything, or are free."""
    free: frozenset[str] = frozenset()
    """Units whose choice is optimized."""
    may_offload: bool = False
    """Whether free units may offload to host memory."""
    may_keep_products: bool = True
    """Whether free units may keep the results of matrix products and recompute only the rest."""
    preserve_rng_state: bool = True
    """Whether recomputation draws the same random numbers."""
    min_bytes: int = 0
    """Size from which tensors are offloaded; smaller ones stay on the device."""
    horizon: int = DEFAULT_HORIZON
    """Actions by which copies from host memory come ahead of their use."""

    @property
    def choices(self) -> tuple[ActivationPolicy, ...]:
        """Choices for a free unit; the first is preferred among equally good ones."""
        again: tuple[Recompute, ...] = ("no", "cheap", "all") if self.may_keep_products else ("no", "all")
        ways = product((False, True) if self.may_offload else (False,), again)
        return tuple(
            ActivationPolicy(recompute=recompute, offload=offload, preserve_rng_state=self.preserve_rng_state)
            for offload, recompute in ways
        )

    def taking(self, activation_policies: ActivationPolicies) -> "ActivationPlan":
        """Copy in which the free units named by ``activation_policies`` are fixed."""
        taken = {name: policy for name, policy in activation_policies.items() if name in self.free}
        return replace(self, fixed={**self.fixed, **taken}, free=self.free.difference(taken))

    def treated(
        self,
        trace: Trace,
        work: Mapping[int, Work],
        activation_policies: ActivationPolicies,
        stage_of: Mapping[str, int],
    ) -> tuple[Trace, dict[int, Work]]:
        """Events and their work under ``activation_policies``."""
        return treated(trace, work, activation_policies, stage_of, machine=self.machine, min_bytes=self.min_bytes)

    def least_kept(self, trace: Trace, work: Mapping[int, Work]) -> tuple[Trace, dict[int, Work]]:
        """Lower bounds: events with the least bytes and the least work under any choice (no feasible candidate)."""
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

    def flow(self, microbatch: "Microbatch", activation_policies: ActivationPolicies) -> Flow:
        """Segment graph under ``activation_policies``."""
        stage_of = microbatch.stage_of
        trace, work = self.treated(microbatch.trace, microbatch.work, activation_policies, stage_of)
        return self._with_copies(route(trace, stage_of, microbatch.num_stages, work).at_speeds(microbatch.speeds))

    def _with_copies(self, flow: Flow) -> Flow:
        """``flow`` with passes at least as long as their copies to and from the host."""
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
    """Microbatch with a placement of its units on stages."""

    trace: Trace
    work: Mapping[int, Work]
    stage_of: Mapping[str, int]
    num_stages: int
    speeds: Sequence[float] = ()
    """Relative speeds of the stages; empty: all equal."""
    gradients: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the gradients of each unit, if a step begins without them."""


@final
class CallTable:
    """Cache over candidates of a partition: costs of every call under every choice, and solved knapsacks."""

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
        """Cached :func:`smp_strategy.planning.activation_budget.knapsack.choose`."""
        key = (tuple(map(tuple, units)), stock)
        if key not in self._verdicts:
            self._verdicts[key] = choose(units, stock)
        return self._verdicts[key]


class SimulatedStep(NamedTuple):
    """Simulated step with its peak memory."""

    plan: Plan
    peaks: tuple[Peak, ...]
    """Each stage when it is fullest."""
    activation_policies: ActivationPolicies
    """Choices of all units that do not keep everything."""


def relieve(
    relief: ActivationPlan,
    microbatch: Microbatch,
    room: Sequence[int | None],
    simulate: Callable[[Flow], Plan],
    table: CallTable | None = None,
) -> SimulatedStep:
    """The fastest step that fits its memory; if none is found, one that keeps as little as possible.

    Args:
        relief: Fixed and free choices of recomputation and offload.
        microbatch: Microbatch on its stages.
        room: Bytes for activations on each stage; ``None``: unlimited.
        simulate: Scheduler of a step.
        table: Cached costs of the calls, if there are any.
    """
    search = _Search(relief, microbatch, room, simulate, table)
    found = search.simulated(relief.fixed)
    if not relief.free or search.fits(found):
        return found
    activation_policies = dict(relief.fixed)
    for _ in range(MOST_ROUNDS):
        for stage in search.too_full(found):
            activation_policies = {**activation_policies, **search.chosen(stage, found)}
        found = search.simulated(activation_policies)
        if search.fits(found) or not search.has_hope:
            break
    return found


@final
class _Search:
    """Search for one partition. Arguments as for :func:`relieve`."""

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
        # Bytes per stage by which the estimate was too low: units that are called several times, or differ much.
        self._missing = [0] * len(room)
        self._flow: Flow | None = None
        self._table = table
        self.has_hope = True

    def simulated(self, activation_policies: ActivationPolicies) -> SimulatedStep:
        flow = self._flow = self._relief.flow(self._microbatch, activation_policies)
        plan = self._simulate(flow)
        used = {name: policy for name, policy in activation_policies.items() if not policy.is_default}
        return SimulatedStep(plan, peaks(plan, flow, self._relief.horizon, self._microbatch.gradients), used)

    def fits(self, found: SimulatedStep) -> bool:
        """Whether every stage is within its limit."""
        return not self.too_full(found)

    def too_full(self, found: SimulatedStep) -> list[int]:
        """Stages over their limit."""
        both = enumerate(zip(found.peaks, self._room, strict=True))
        return [stage for stage, (peak, most) in both if most is not None and peak.total > most]

    def chosen(self, stage: int, found: SimulatedStep) -> dict[str, ActivationPolicy]:
        """Choices for the units of ``stage`` that fit at all known moments, with those of this plan."""
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
        # Copies are hidden by the work of a microbatch, in forward and in backward.
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
        """Alternatives of each free unit on ``stage``, in program order; everything else has no name and a single
        alternative."""
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
        """Costs of the calls of a unit under choice ``number``."""
        costs = [self._calls.costs[call.position][number] for _, call in calls]
        kept = [
            (segment, KeptBytes(call.name, *each[:3], working=call.working))
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
    """Bytes that calls of a unit add to a moment."""
    around = before = during = 0
    for segment, call in calls:
        around += moment.kept.get(segment, 0) * call.saved
        around += moment.near.get(segment, 0) * call.offloaded
        running = moment.running
        if running is not None and running.segment == segment:
            before += call.saved * running.frees
            during = max(during, call.again * running.recomputes + running.window * call.offloaded + call.working)
    return MemoryUse(around, before, during)


def _least(alternatives: Sequence[Alternative]) -> int:
    """The alternative that leaves the fewest bytes; during the unit's own backward all are alike."""

    def left(number: int) -> tuple[int, int]:
        loads = alternatives[number].loads
        return sum(load.around + load.before for load in loads), sum(load.during for load in loads)

    return min(range(len(alternatives)), key=left)
