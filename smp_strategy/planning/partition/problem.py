"""Partitioning problem: units with their costs, stages with their limits, and the objective, as plain data.

The units stand in execution order and are cut into *chunks*, contiguous runs; the stage of each chunk is given (one
chunk per stage, or several under virtual stages). The objective to minimize is

    J = (1 - a) * step_time / T_ref + a * max over stages of memory / M_ref

with ``a`` the ``memory_weight``. Step time and activations of a candidate come from a simulation of its schedule
(:class:`Score`). Parameters, gradients and optimizer state of the fullest rank of a stage are counted here; a parameter
that units of the stage share counts once. T_ref is the time of a step without any waiting, M_ref the memory of the
first stage under 1F1B if all memory was spread evenly: both are constants of the problem, so J is 1 in the ideal case.

A stage may have a limit of memory; candidates beyond it are infeasible.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, final

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.distributed.balance import balanced
from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.schedule.peak_memory import Peak

__all__ = [
    "HeldBytes",
    "InFlight",
    "PartitionProblem",
    "Promise",
    "Score",
    "Setting",
    "UnitCost",
    "Window",
    "chain_of",
    "problem_of",
]


class HeldBytes(NamedTuple):
    """Bytes that a rank holds for one parameter, or for a group of parameters that are sharded together.

    A frozen parameter has no gradient and no optimizer state.
    """

    parameter: int
    """Values, between uses."""
    gradient: int = 0
    """Gradient, between the last backward and the optimizer's step."""
    optimizer: int = 0
    """Optimizer state."""
    gathered: int = 0
    """Gathered values of sharded parameters, while they are in use."""
    unreduced: int = 0
    """Unreduced gradients of sharded parameters, before the reduce-scatter."""
    updating: int = 0
    """Temporary results of the optimizer, which updates parameters one after the other."""

    @property
    def states(self) -> int:
        """Persistent bytes: parameters, gradients and optimizer state."""
        return self.parameter + self.gradient + self.optimizer

    @property
    def passing(self) -> int:
        """Temporary bytes of a step: gathered values and unreduced gradients."""
        return self.gathered + self.unreduced

    @property
    def total(self) -> int:
        """Persistent and temporary bytes of the passes over the model."""
        return self.states + self.passing

    def peak(self, beside: int) -> int:
        """Bytes at the fullest moment: of the passes, with ``beside`` for activations, or of the update."""
        return max(self.total + beside, self.states + self.updating)

    @classmethod
    def sum_of(cls, parts: Iterable["HeldBytes"]) -> "HeldBytes":
        """Sum of ``parts`` by kind."""
        parts = list(parts)
        found = cls(*map(sum, zip(cls(0), *parts, strict=True)))
        return found._replace(updating=max((part.updating for part in parts), default=0))


@final
@dataclass(frozen=True)
class UnitCost:
    """Costs of one unit, with the glue operations that always run on its stage."""

    name: str
    parameters: Mapping[int, HeldBytes]
    """Bytes that a rank holds of each parameter; a shared parameter has the same key in all units."""
    activation_bytes: int = 0
    """Activations of one microbatch."""
    output_bytes: int = 0
    """Results of one microbatch."""
    work: Work = Work()
    """Work of one microbatch."""
    whole: HeldBytes = HeldBytes(0)
    """Unsharded bytes of all its parameters."""

    @property
    def held(self) -> HeldBytes:
        """Bytes that a rank holds of all its parameters."""
        return HeldBytes.sum_of(self.parameters.values())


class Score(NamedTuple):
    """Simulation result of a candidate."""

    step_seconds: float
    peaks: tuple[Peak, ...]
    """Each stage when it is fullest."""
    activation_policies: ActivationPolicies = {}
    """Recomputation and offload of all units that do not keep everything."""


class Promise(NamedTuple):
    """Guaranteed bounds on the peak number of microbatches in flight on a stage."""

    least: int = 1
    most: int | None = None


class InFlight(NamedTuple):
    """Microbatches in flight on a stage."""

    always: Promise = Promise()
    """Bounds for any program."""
    on_chain: Promise = Promise()
    """Bounds for programs that never come back to a stage."""
    likely: int = 1
    """Estimate without guarantee."""


class Window(NamedTuple):
    """Critical paths before and after a unit's work, under any partition.

    Only work that the loss depends on counts. Backward paths consist of whole backwards, or of input gradients under a
    schedule that splits backwards.
    """

    work: Work = Work()
    saved_bytes: int = 0
    """Activations with a backward pass."""
    head: float = float("inf")
    """Forward work before the unit."""
    after: float = float("inf")
    """Forward work between the unit and the loss."""
    back: float = float("inf")
    """Backward work between the loss and the unit."""
    tail: float = float("inf")
    """Backward work after the unit."""


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """Stages, schedule bounds, limits and weights of a partitioning problem."""

    num_stages: int
    stage_of_chunk: tuple[int, ...]
    """Stage of each chunk, in execution order."""
    num_microbatches: int = 1
    memory_weight: float = 0.0
    memory_limits: tuple[int | None, ...] = ()
    """Bytes per stage; empty: unlimited."""
    stage_speeds: tuple[float, ...] = ()
    """Relative speeds; empty: all equal."""
    splits_backward: bool = False
    """Whether the schedule postpones weight gradients."""
    in_flight: tuple[InFlight, ...] = ()
    """Microbatches in flight per stage; empty: no bounds."""
    state_shards: int = 1
    """Ranks of a stage that share its optimizer state, by whole parameters."""

    @classmethod
    def plain(cls, num_stages: int, **changes: object) -> "Setting":
        """Setting with one chunk per stage."""
        return cls(num_stages=num_stages, stage_of_chunk=tuple(range(num_stages)), **changes)  # type: ignore[arg-type]

    def limit(self, stage: int) -> int | None:
        """Most bytes on ``stage``."""
        return self.memory_limits[stage] if self.memory_limits else None

    def speed(self, stage: int) -> float:
        return self.stage_speeds[stage] if self.stage_speeds else 1.0

    def flight(self, stage: int) -> InFlight:
        return self.in_flight[stage] if self.in_flight else InFlight()


@final
@dataclass(frozen=True)
class PartitionProblem:
    """Units in execution order, with the setting that they are partitioned under."""

    units: Sequence[UnitCost]
    setting: Setting
    windows: Sequence[Window]
    """Window of each unit."""
    critical_forward: float
    """Seconds of the longest forward path of a single microbatch."""
    cut_bytes: Sequence[int]
    """Bytes that cross a cut before unit i, per microbatch."""
    is_chain: bool
    """Whether the program runs the units one after the other and never comes back, so that stages form a chain."""
    everywhere: Mapping[int, HeldBytes] = field(default_factory=dict)
    """Bytes that every stage holds, independent of its units, by key of the parameter."""

    def stage_of(self, starts: Sequence[int]) -> dict[str, int]:
        """Stage of each unit for chunks that begin at the units ``starts``."""
        ends = [*starts[1:], len(self.units)]
        return {
            unit.name: stage
            for stage, begin, end in zip(self.setting.stage_of_chunk, starts, ends, strict=True)
            for unit in self.units[begin:end]
        }

    def held(self, stage_of: Mapping[str, int]) -> tuple[HeldBytes, ...]:
        """Bytes on the fullest rank of each stage under an assignment of units."""
        unique = [dict(self.everywhere) for _ in range(self.setting.num_stages)]
        for unit in self.units:
            unique[stage_of[unit.name]].update(unit.parameters)
        return tuple(self._dealt_out(parameters) for parameters in unique)

    @cached_property
    def gradients(self) -> Mapping[str, int]:
        """Bytes of the gradients that only the stage of each unit holds."""
        # The gradient of a shared parameter begins with the last unit that uses it.
        last = {key: unit.name for unit in self.units for key in unit.parameters if key not in self.everywhere}
        return {
            unit.name: sum(held.gradient for key, held in unit.parameters.items() if last.get(key) == unit.name)
            for unit in self.units
        }

    def at_least(self, held: HeldBytes) -> int:
        """Lower bound on the bytes that parameters add to the fullest rank of their stage."""
        return held.total - held.optimizer + held.optimizer // self.setting.state_shards

    def _dealt_out(self, parameters: Mapping[int, HeldBytes]) -> HeldBytes:
        """Bytes on the fullest rank of a stage with these parameters."""
        total, num_shares = HeldBytes.sum_of(parameters.values()), self.setting.state_shards
        if num_shares == 1:
            return total
        # Same balancing as ZeRO-1 at run time: trained parameters in order of registration.
        trained = [held for _, held in sorted(parameters.items()) if held.gradient]
        shares = [0] * num_shares
        for held, share in zip(trained, balanced([held.parameter for held in trained], num_shares), strict=True):
            shares[share] += held.optimizer
        return total._replace(optimizer=max(shares))

    def memory(self, stage_of: Mapping[str, int], score: Score) -> tuple[int, ...]:
        """Peak bytes of each stage."""
        return tuple(held.peak(peak.total) for held, peak in zip(self.held(stage_of), score.peaks, strict=True))

    def fits(self, memory: Sequence[int]) -> bool:
        """Whether every stage stays within its limit."""
        limits = self.setting.memory_limits or [None] * len(memory)
        return all(limit is None or peak <= limit for peak, limit in zip(memory, limits, strict=True))

    def cost(self, step_seconds: float, memory: float) -> float:
        """Objective J for the memory of the fullest stage."""
        weight = self.setting.memory_weight
        return (1 - weight) * step_seconds / self.ideal_seconds + weight * memory / self.ideal_memory

    @cached_property
    def ideal_seconds(self) -> float:
        """T_ref of the objective, in seconds."""
        setting = self.setting
        speed = sum(setting.speed(stage) for stage in range(setting.num_stages))
        total = sum(sum(unit.work) for unit in self.units)
        return setting.num_microbatches * total / speed or 1.0

    @cached_property
    def ideal_memory(self) -> float:
        """M_ref of the objective, in bytes."""
        parameters = {key: held for unit in self.units for key, held in unit.parameters.items()}
        spread = sum(self.at_least(held) for key, held in parameters.items() if key not in self.everywhere)
        activations = sum(unit.activation_bytes for unit in self.units)
        return spread / self.setting.num_stages + self.everywhere_bytes + activations or 1.0

    @cached_property
    def everywhere_bytes(self) -> int:
        """Lower bound on the bytes that every stage holds, independent of its units."""
        return sum(self.at_least(held) for held in self.everywhere.values())


# --- problem of a trace ----------------------------------------------------------------------------------------------
# Partitioning problem of a trace: order and costs of the units, and the critical paths through them.
#
# A glue operation runs where the newest of its inputs was made. If a unit made it, or an operation that runs with a
# unit, the operation runs with this unit under every partition, and its costs are added to the unit's. Operations on
# values that Python code has read run on all stages and belong to no unit.


def chain_of(parameter_bytes: Mapping[str, int]) -> tuple[Trace, dict[int, Work]]:
    """Substitute for a trace: a chain of units with work proportional to their parameters."""
    events: list[Event] = []
    work: dict[int, Work] = {}
    last: tuple[Value, ...] = ()
    for position, (name, nbytes) in enumerate(parameter_bytes.items()):
        value = Value(position, 0, requires_grad=True)
        events.append(Event("unit", name, last, (value,)))
        work[position] = Work(*[float(nbytes)] * 3)
        last = (value,)
    return Trace(events, len(events) - 1 if events else None), work


def problem_of(
    trace: Trace,
    work: Mapping[int, Work],
    parameters: Mapping[str, Mapping[int, HeldBytes]],
    setting: Setting,
    *,
    everywhere: Mapping[int, HeldBytes] | None = None,
    whole: Mapping[str, HeldBytes] | None = None,
    least: tuple[Trace, Mapping[int, Work]] | None = None,
) -> PartitionProblem:
    """Partitioning problem of a traced microbatch.

    Units that the trace does not call (a head that only validation uses) follow the unit registered before them.

    Args:
        trace: Events of one microbatch.
        work: Work of each event, by position.
        parameters: Bytes that a rank holds per parameter of each unit; units in order of registration.
        setting: Stages, limits and weights.
        everywhere: Bytes that every stage holds, independent of its units.
        whole: Unsharded bytes of each unit's parameters, if a rank holds only a shard.
        least: Trace and work with the least activations and the least work under any choice of recomputation and
            offload, for lower bounds. ``None``: there is no choice.
    """
    events, owners = trace.events, _owners(trace.events, setting.num_stages)
    first_call: dict[str, int] = {}
    for position, event in enumerate(events):
        if event.kind == "unit":
            first_call.setdefault(event.name, position)
    order = _execution_order(list(parameters), first_call)
    mine: dict[str, list[int]] = {name: [] for name in order}
    for position, owner in owners.items():
        mine[owner].append(position)
    units = [
        UnitCost(
            name,
            parameters[name],
            sum(events[position].saved_bytes for position in mine[name]),
            sum(value.nbytes for p in mine[name] if events[p].kind == "unit" for value in events[p].outputs),
            _total(work.get(position, Work()) for position in mine[name]),
            HeldBytes.sum_of(parameters[name].values()) if whole is None else whole[name],
        )
        for name in order
    ]
    ways = _Ways(*(least or (trace, work)), setting)
    cuts: list[int] = []
    position = len(events)
    for name in reversed(order):
        # The cut before a unit that is not called has the traffic of the next called one.
        position = first_call.get(name, position)
        cuts.append(_crossing(events, position))
    windows = [ways.window(mine[name]) for name in order]
    is_chain = _is_chain(events, [mine[name] for name in order])
    return PartitionProblem(units, setting, windows, ways.critical_forward, cuts[::-1], is_chain, everywhere or {})


def _total(parts: Iterable[Work]) -> Work:
    total = Work()
    for part in parts:
        total = total.plus(part)
    return total


def _owners(events: Sequence[Event], num_stages: int) -> dict[int, str]:
    """Unit that each event runs with, by position."""
    owners: dict[int, str] = {}
    owner_of: dict[int, str | None] = {}
    everywhere: set[int] = set()
    for position, event in enumerate(events):
        owner: str | None = None
        if event.kind == "unit":
            owner = event.name
        elif event.kind == "op":
            pulling = [value for value in event.inputs if value.id not in everywhere] or event.inputs
            owner = owner_of.get(max(pulling, key=_number).id)
        elif event.kind == "read" or len(event.home) == num_stages:
            everywhere.update(value.id for value in event.outputs)
        owner_of.update((value.id, owner) for value in event.outputs)
        if owner is not None:
            owners[position] = owner
    return owners


def _number(value: Value) -> int:
    return value.id


@final
class _Ways:
    """Longest paths through the events of a microbatch, forward and backward."""

    def __init__(self, trace: Trace, work: Mapping[int, Work], setting: Setting) -> None:
        self._events = trace.events
        # For a lower bound, all work runs at the speed of the fastest stage.
        fastest = max(setting.stage_speeds, default=1.0)
        # Reads and inputs take no time in a step (`route`), whatever their `work` is.
        computing = {position for position, event in enumerate(trace.events) if event.kind in ("unit", "op")}
        self._work = [work.get(p, Work()) if p in computing else Work() for p in range(len(trace.events))]
        self._forward = [each.forward / fastest for each in self._work]
        self._backward = [
            (each.input_gradient if setting.splits_backward else each.backward) / fastest for each in self._work
        ]
        self._maker = {value.id: p for p, event in enumerate(trace.events) for value in event.outputs}
        self._reach_backward(trace)
        self._reach_forward(trace)

    def _reach_forward(self, trace: Trace) -> None:
        """Longest forward paths to each event, and from it to the loss."""
        self._head = [0.0] * len(self._events)
        for position, event in enumerate(self._events):
            before = [self._maker[value.id] for value in event.inputs if value.id in self._maker]
            self._head[position] = max((self._head[p] + self._forward[p] for p in before), default=0.0)
        self._after: dict[int, float] = {}
        if trace.loss in self._maker:
            self._after[self._maker[trace.loss]] = 0.0
        elif self._events:
            self._after = dict.fromkeys(range(len(self._events)), 0.0)
        for position in range(len(self._events) - 1, -1, -1):
            if position not in self._after:
                continue
            way = self._after[position] + self._forward[position]
            for value in self._events[position].inputs:
                before_this = self._maker.get(value.id)
                if before_this is not None:
                    self._after[before_this] = max(self._after.get(before_this, 0.0), way)
        self.critical_forward = max((self._head[p] + self._forward[p] for p in self._after), default=0.0)

    def _reach_backward(self, trace: Trace) -> None:
        """Longest backward paths from the loss to each event, and from it to the end of backward."""
        wanted = set() if trace.loss is None else {trace.loss}
        self._back: dict[int, float] = {}
        if trace.loss in self._maker:
            self._back[self._maker[trace.loss]] = 0.0
        for position in range(len(self._events) - 1, -1, -1):
            event = self._events[position]
            if not any(value.requires_grad and value.id in wanted for value in event.outputs):
                continue
            way = self._back.setdefault(position, 0.0) + self._backward[position]
            for value in event.inputs:
                if value.requires_grad:
                    wanted.add(value.id)
                    maker = self._maker.get(value.id)
                    if maker is not None:
                        self._back[maker] = max(self._back.get(maker, 0.0), way)
        self._tail: dict[int, float] = {}
        for position in sorted(self._back):
            makers = [
                self._maker[v.id] for v in self._events[position].inputs if v.requires_grad and v.id in self._maker
            ]
            self._tail[position] = max((self._backward[p] + self._tail[p] for p in makers), default=0.0)

    def window(self, positions: Sequence[int]) -> Window:
        """Window of the unit that the events at ``positions`` belong to."""
        relevant = [position for position in positions if position in self._after]
        if not relevant:
            return Window()
        reached = [position for position in relevant if position in self._back]
        parts = [self._work[p] if p in self._back else Work(self._work[p].forward) for p in relevant]
        return Window(
            _total(parts),
            sum(self._events[position].saved_bytes for position in reached),
            min(self._head[position] for position in relevant),
            min(self._after[position] for position in relevant),
            min((self._back[position] for position in reached), default=float("inf")),
            # An event without a gradient is still followed by the rest of the loss.
            min(self._tail.get(position, self._after[position]) for position in relevant),
        )


def _execution_order(names: Sequence[str], first_call: Mapping[str, int]) -> list[str]:
    called = sorted(first_call, key=first_call.__getitem__)
    after: dict[str | None, list[str]] = {}
    previous: str | None = None
    for name in names:
        if name in first_call:
            previous = name
        else:
            after.setdefault(previous, []).append(name)
    order = after.get(None, [])
    for name in called:
        order += [name, *after.get(name, [])]
    return order


def _is_chain(events: Sequence[Event], mine: Sequence[Sequence[int]]) -> bool:
    """Whether the events of each unit come before those of the next one, and values are read only at the end."""
    positions = [position for unit in mine for position in unit]
    behind = events[len(positions) :]
    return all(mine) and positions == list(range(len(positions))) and all(event.kind == "read" for event in behind)


def _crossing(events: Sequence[Event], position: int) -> int:
    """Bytes of the values that are made before ``position`` and used at or after it."""
    made = {value.id: value.nbytes for event in events[:position] for value in event.outputs}
    used = {value.id for event in events[position:] for value in event.inputs}
    return sum(nbytes for value, nbytes in made.items() if value in used)
