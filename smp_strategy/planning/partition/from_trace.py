"""Partitioning problem of a trace: order and costs of the units, and the critical paths through them.

A glue operation runs where the newest of its inputs was made. If a unit made it, or an operation that runs with a unit,
the operation runs with this unit under every partition, and its costs are added to the unit's. Operations on values
that Python code has read run on all stages and belong to no unit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import final

from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.partition.problem import HeldBytes, PartitionProblem, Setting, UnitCost, Window

__all__ = ["chain_of", "problem_of"]


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
