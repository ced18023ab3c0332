"""Where calls run, what moves, and which gradients travel."""

from hypothesis import given

from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.routing import Router, SegmentId, gradient_uses
from smp_strategy.planning.schedule.flow import route
from tests.unit.planning.schedule.flows import chain, flow_of, programs


def value(number: int, *, grad: bool = True) -> Value:
    return Value(number, 8, grad)


def place(events: list[Event], stage_of: dict[str, int], num_stages: int):
    router = Router(stage_of, num_stages)
    return [(event, router.place(event)) for event in events]


def test_an_operation_runs_where_its_newest_input_was_made():
    a, b, c = value(0), value(1), value(2)
    events = [Event("unit", "x", (), (a,)), Event("unit", "y", (), (b,)), Event("op", "add", (b, a), (c,))]
    placed = place(events, {"x": 1, "y": 0}, 2)
    assert [placement.stages for _, placement in placed] == [(1,), (0,), (0,)]
    (move,) = placed[2][1].moves
    assert (move.value, move.source.stage, move.target.stage) == (a, 1, 0)


def test_a_value_travels_to_a_stage_once():
    a, b, c = value(0), value(1), value(2)
    events = [Event("unit", "x", (), (a,)), Event("unit", "y", (a,), (b,)), Event("unit", "y", (a, a), (c,))]
    placed = place(events, {"x": 0, "y": 1}, 2)
    assert [len(placement.moves) for _, placement in placed] == [0, 1, 0]


def test_a_read_brings_the_value_to_every_stage():
    a = value(0)
    placed = place([Event("unit", "x", (), (a,)), Event("read", "item", (a,), ())], {"x": 1}, 3)
    assert placed[1][1].stages == (0, 1, 2)
    assert [move.target.stage for move in placed[1][1].moves] == [0, 2]


def test_a_round_trip_gives_each_stage_two_segments():
    flow = flow_of(0, 1, 0, 1)
    s = SegmentId
    assert list(flow.work) == [s(0, 0), s(1, 0), s(0, 1), s(1, 1)]
    assert flow.forward_needs == {
        s(0, 0): {},
        s(1, 0): {s(0, 0): 8},
        s(0, 1): {s(0, 0): 0, s(1, 0): 8},
        s(1, 1): {s(1, 0): 0, s(0, 1): 8},
    }
    assert flow.backward_needs == {
        s(0, 0): {s(1, 0): 8},
        s(1, 0): {s(0, 1): 8},
        s(0, 1): {s(1, 1): 8},
        s(1, 1): {},
    }
    assert flow.cut_bytes == {(0, 1): 16, (1, 0): 8}


def test_units_of_one_stage_in_a_row_are_one_segment():
    assert list(flow_of(0, 0, 1, 1).work) == [SegmentId(0, 0), SegmentId(1, 0)]
    assert list(flow_of(0, 0, 1, 1).work.values()) == [Work(2.0, 2.0, 2.0)] * 2


def test_a_frozen_part_gets_no_gradient():
    # x (frozen) -> y -> loss
    a, b = value(0, grad=False), value(1)
    events = [Event("unit", "x", (), (a,)), Event("unit", "y", (a,), (b,))]
    wanted, uses = gradient_uses(place(events, {"x": 0, "y": 1}, 2), 1)
    assert (wanted, uses) == ({1}, set())
    flow = route(Trace(events, 1), {"x": 0, "y": 1}, 2, {})
    assert list(flow.backward_needs) == [SegmentId(1, 0)]


def test_a_value_that_only_leads_to_a_detached_one_gets_no_gradient():
    # x -> detach -> target; x -> y -> loss(y, target)
    a, target, b, loss = value(0), value(1, grad=False), value(2), value(3)
    events = [
        Event("unit", "x", (), (a,)),
        Event("op", "detach", (a,), (target,)),
        Event("unit", "y", (a,), (b,)),
        Event("op", "mse", (b, target), (loss,)),
    ]
    wanted, uses = gradient_uses(place(events, {"x": 0, "y": 1}, 2), 3)
    assert wanted == {0, 2, 3}
    # The comparison waits for the target when stage 1 has computed already, in a second segment.
    assert uses == {(0, SegmentId(1, 0)), (2, SegmentId(1, 1))}


def test_a_value_that_does_not_lead_to_the_loss_gets_no_gradient():
    a, metric, loss = value(0), value(1), value(2)
    events = [
        Event("unit", "x", (), (a,)),
        Event("unit", "y", (a,), (metric,)),
        Event("op", "sum", (a,), (loss,)),
    ]
    wanted, uses = gradient_uses(place(events, {"x": 0, "y": 1}, 2), 2)
    assert wanted == {0, 2}
    assert uses == {(0, SegmentId(0, 0))}


def test_a_read_returns_no_gradient():
    a, b = value(0), value(1)
    events = [Event("unit", "x", (), (a,)), Event("read", "bool", (a,), ()), Event("unit", "x", (a,), (b,))]
    _, uses = gradient_uses(place(events, {"x": 0}, 2), 1)
    assert uses == {(0, SegmentId(0, 0))}


def test_without_a_loss_there_is_no_backward():
    trace, stage_of = chain(0, 1)
    assert route(Trace(trace.events), stage_of, 2, {}).backward_needs == {}


def test_the_path_of_a_trace_does_not_depend_on_sizes():
    small, large = (Trace([Event("unit", "x", (), (Value(0, size, True),))], 0) for size in (8, 16))
    other = Trace([Event("unit", "x", (), (Value(0, 8, False),))], 0)
    assert small.signature == large.signature != other.signature


def test_a_stage_that_passes_values_on_between_two_waits_has_two_segments():
    # Stage 1 waits for a, hands b to stage 0, and waits for what stage 0 makes of it.
    a, b, c = value(0), value(1), value(2)
    events = [
        Event("unit", "x", (), (a,)),
        Event("unit", "y", (), (b,)),
        Event("read", "item", (a,), ()),
        Event("unit", "x", (b,), (c,)),
        Event("read", "item", (c,), ()),
    ]
    flow = route(Trace(events), {"x": 0, "y": 1}, 2, {})
    assert set(flow.forward_needs[SegmentId(0, 1)]) == {SegmentId(0, 0), SegmentId(1, 1)}
    assert set(flow.forward_needs[SegmentId(1, 2)]) == {SegmentId(1, 0), SegmentId(1, 1), SegmentId(0, 1)}


@given(programs())
def test_segments_depend_on_earlier_work_only(program):
    trace, stage_of, num_stages = program
    flow = route(trace, stage_of, num_stages, {})
    for needs in (flow.forward_needs, flow.backward_needs):
        done: set[SegmentId] = set()
        while len(done) < len(needs):
            ready = {segment for segment, before in needs.items() if segment not in done and set(before) <= done}
            assert ready, "a cycle"
            done |= ready


@given(programs())
def test_every_input_is_on_the_stage_that_uses_it(program):
    trace, stage_of, num_stages = program
    held: set[tuple[int, int]] = set()
    home: dict[int, int] = {}
    for event, placement in place(list(trace.events), stage_of, num_stages):
        for move in placement.moves:
            assert move.source.stage == home[move.value.id]
            assert (move.value.id, move.target.stage) not in held
            held.add((move.value.id, move.target.stage))
        assert all((used.id, stage) in held for used in event.inputs for stage in placement.stages)
        for made in event.outputs:
            home[made.id] = placement.stages[0]
            held.add((made.id, placement.stages[0]))
