"""Handmade and random traces, and an independent executor of plans."""

from hypothesis import strategies as st

from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.routing import Router, gradient_uses
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.flow import Flow, route


def chain(*stages: int) -> tuple[Trace, dict[str, int]]:
    """Units one after the other; the last one returns the loss."""
    events: list[Event] = []
    last: tuple[Value, ...] = ()
    for index in range(len(stages)):
        out = Value(index, 8, requires_grad=True)
        events.append(Event("unit", f"u{index}", last, (out,)))
        last = (out,)
    return Trace(events, len(stages) - 1), {f"u{index}": stage for index, stage in enumerate(stages)}


def chain_of(works: list[Work], saved_bytes: int = 0) -> Flow:
    """A stage for each of ``works``, one after the other."""
    trace, stage_of = chain(*range(len(works)))
    events = [event._replace(saved_bytes=saved_bytes) for event in trace.events]
    return route(Trace(events, trace.loss), stage_of, len(works), dict(enumerate(works)))


def flow_of(*stages: int, work: Work = Work(1.0, 1.0, 1.0)) -> Flow:  # noqa: B008  (a named tuple cannot change)
    """Units that all take ``work``, one after the other, each on its stage."""
    trace, stage_of = chain(*stages)
    return route(trace, stage_of, max(stages) + 1, dict.fromkeys(range(len(stages)), work))


@st.composite
def programs(draw: st.DrawFn) -> tuple[Trace, dict[str, int], int]:
    """A random program: chains, skips, reused units, operations, reads, frozen values; on 1 to 4 stages."""
    num_stages = draw(st.integers(1, 4))
    num_units = draw(st.integers(1, 5))
    stage_of = {f"u{i}": draw(st.integers(0, num_stages - 1)) for i in range(num_units)}
    values: list[Value] = []
    events: list[Event] = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["unit", "unit", "op", "read"])) if values else "unit"
        at_most = min(3, len(values))
        inputs = draw(st.lists(st.sampled_from(values), min_size=kind != "unit", max_size=at_most)) if values else []
        outputs = ()
        if kind != "read":
            num_outputs = draw(st.integers(1, 2))
            outputs = tuple(Value(len(values) + i, 8, draw(st.booleans())) for i in range(num_outputs))
        values += outputs
        name = draw(st.sampled_from(sorted(stage_of))) if kind == "unit" else "f"
        events.append(Event(kind, name, tuple(inputs), outputs))
    losses = [value.id for value in values if value.requires_grad]
    return Trace(events, draw(st.sampled_from(losses)) if losses else None), stage_of, num_stages


def execute(plan: Plan, trace: Trace, stage_of: dict[str, int], num_microbatches: int) -> None:
    """Follow ``plan`` on all stages at once, each blocking until its messages are there; fail where it gets stuck.

    The messages are taken from the events, not from the graph that the scheduler works on.
    """
    num_stages = len(plan.stages)
    router = Router(stage_of, num_stages)
    placed = [(event, router.place(event)) for event in trace.events]
    moves = [move for _, placement in placed for move in placement.moves]
    made = {
        value.id: placement.segments[0]
        for event, placement in placed
        if event.kind != "read"
        for value in event.outputs
    }
    arrived = {(move.value.id, move.target.stage): move.target for move in moves}
    _, uses = gradient_uses(placed, trace.loss)
    # Gradient messages: sent by the backward of the segment that received the value, awaited by that which made it.
    returns = {(v, user.stage): (arrived[v, user.stage], made[v]) for v, user in uses if user.stage != made[v].stage}
    sent: set[tuple] = set()
    position = [0] * num_stages
    progress = True
    while progress:
        progress = False
        for stage in range(num_stages):
            while position[stage] < len(plan.stages[stage]):
                action = plan.stages[stage][position[stage]]
                here = (stage, action.segment)
                if action.kind == "F":
                    awaited = {("value", action.microbatch, move.number) for move in moves if move.target == here}
                    sends = {("value", action.microbatch, move.number) for move in moves if move.source == here}
                elif action.kind == "W":
                    awaited, sends = {("inputs", action.microbatch, here)}, set()
                else:
                    awaited = {("grad", action.microbatch, key) for key, (_, to) in returns.items() if to == here}
                    sends = {("grad", action.microbatch, key) for key, (by, _) in returns.items() if by == here}
                if not awaited <= sent:
                    break
                sent |= sends
                if action.kind == "I":
                    sent.add(("inputs", action.microbatch, here))
                position[stage] += 1
                progress = True
    stuck = [stage for stage in range(num_stages) if position[stage] < len(plan.stages[stage])]
    assert not stuck, f"stages {stuck} wait for ever"
    expected = {("value", mb, move.number) for mb in range(num_microbatches) for move in moves}
    expected |= {("grad", mb, key) for mb in range(num_microbatches) for key in returns}
    assert {message for message in sent if message[0] != "inputs"} == expected
