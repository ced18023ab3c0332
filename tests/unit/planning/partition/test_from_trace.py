"""Partitioning problem of a trace."""

import pytest

from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.partition.problem import HeldBytes, Setting, chain_of, problem_of
from tests.unit.planning.partition.problems import chain

PARAMETERS = {
    "embed": {0: HeldBytes(100)},
    "a": {1: HeldBytes(10)},
    "b": {2: HeldBytes(20)},
    "head": {0: HeldBytes(100), 3: HeldBytes(5)},
}

WORK = {position: Work(time, time, time) for position, time in enumerate([864, 1000, 1000, 8000, 32, 5])}


def value(number: int, nbytes: int) -> Value:
    return Value(number, nbytes, True)


def trace() -> Trace:
    """embed -> a -> b -> (skip of embed) -> head; `a` is called twice."""
    e, a1, a2, b, mixed, out = (value(number, nbytes) for number, nbytes in enumerate([8, 16, 16, 32, 32, 4]))
    return Trace(
        [
            Event("unit", "embed", (), (e,), saved_bytes=1),
            Event("unit", "a", (e,), (a1,), saved_bytes=10),
            Event("unit", "a", (a1,), (a2,), saved_bytes=10),
            Event("unit", "b", (a2,), (b,), saved_bytes=100),
            Event("op", "add", (b, e), (mixed,), saved_bytes=7),
            Event("unit", "head", (mixed,), (out,), saved_bytes=1000),
        ],
        5,
    )


def problem(parameters=PARAMETERS, **changes):
    return problem_of(trace(), WORK, parameters, Setting.plain(2, **changes))


def test_a_unit_costs_the_sum_of_its_calls():
    units = {unit.name: unit for unit in problem().units}
    assert units["a"].work == Work(2000, 2000, 2000)
    assert units["a"].activation_bytes == 20
    assert units["a"].output_bytes == 32
    assert units["head"].held.parameter == 105


def test_an_operation_of_the_glue_belongs_to_the_unit_that_made_its_newest_input():
    units = {unit.name: unit for unit in problem().units}
    assert units["b"].work.forward == 8000 + 32
    assert units["b"].activation_bytes == 107


def test_what_follows_a_read_belongs_to_no_unit():
    u, seen, out = value(0, 1), value(1, 1), value(2, 1)
    events = [
        Event("unit", "a", (), (u,)),
        Event("read", "item", (u,), (seen,)),
        Event("op", "mul", (seen,), (out,)),
    ]
    found = problem_of(Trace(events, 2), {0: Work(1, 1, 1), 2: Work(50, 50, 50)}, {"a": {}}, Setting.plain(2))
    assert found.units[0].work.forward == 1


def test_units_stand_in_the_order_of_their_first_call():
    shuffled = {name: PARAMETERS[name] for name in ("head", "b", "a", "embed")}
    assert [unit.name for unit in problem(shuffled).units] == ["embed", "a", "b", "head"]


def test_a_cut_is_crossed_by_what_is_made_before_and_used_after():
    # Before a: e. Before b: a2 and the skip e. Before head: mixed.
    assert problem().cut_bytes == [0, 8, 24, 32]


def test_a_unit_that_the_trace_does_not_call_follows_the_one_registered_before_it():
    names = ("first", "embed", "unused", "a", "b", "head", "last")
    found = problem({name: {number: HeldBytes(1)} for number, name in enumerate(names)})
    assert [unit.name for unit in found.units] == ["first", "embed", "unused", "a", "b", "head", "last"]
    assert {unit.work for unit in found.units if unit.name in ("first", "unused", "last")} == {Work()}
    # Before `unused` passes what passes before `a`.
    assert found.cut_bytes == [0, 0, 8, 8, 24, 32, 0]


def test_ways_of_a_chain_are_sums_of_the_work_before_and_after():
    events, work = chain([Work(1, 2, 4), Work(10, 20, 40), Work(100, 200, 400)])
    whole = problem_of(events, work, {f"u{i}": {} for i in range(3)}, Setting.plain(2))
    assert whole.windows[1][2:] == (1, 100, 600, 6)
    assert whole.critical_forward == 111
    split = problem_of(events, work, {f"u{i}": {} for i in range(3)}, Setting.plain(2, splits_backward=True))
    assert split.windows[1][2:] == (1, 100, 200, 2)


def test_the_second_of_two_towers_does_not_wait_for_the_first():
    image, text, both = (value(number, 1) for number in range(3))
    events = [
        Event("unit", "image", (), (image,)),
        Event("unit", "text", (), (text,)),
        Event("unit", "head", (image, text), (both,)),
    ]
    work = {0: Work(5, 5, 5), 1: Work(3, 3, 3), 2: Work(1, 1, 1)}
    found = problem_of(Trace(events, 2), work, {name: {} for name in ("image", "text", "head")}, Setting.plain(2))
    assert [window.head for window in found.windows] == [0, 0, 5]
    assert [window.tail for window in found.windows] == [0, 0, 10]


def test_a_frozen_unit_has_no_backward_work_to_wait_for():
    frozen, trained = Value(0, 1, False), Value(1, 1, True)
    events = [Event("unit", "a", (), (frozen,)), Event("unit", "b", (frozen,), (trained,))]
    work = dict.fromkeys(range(2), Work(1, 1, 1))
    first, second = problem_of(Trace(events, 1), work, {"a": {}, "b": {}}, Setting.plain(2)).windows
    assert first.work == Work(1)
    assert second.work == Work(1, 1, 1)
    assert second.tail == 0


def test_without_a_trace_parameters_alone_decide():
    events, work = chain_of({name: sum(part.parameter for part in held.values()) for name, held in PARAMETERS.items()})
    found = problem_of(events, work, PARAMETERS, Setting.plain(2))
    assert [unit.name for unit in found.units] == list(PARAMETERS)
    assert [unit.work.forward for unit in found.units] == [100, 10, 20, 105]
    assert found.windows[3].head == pytest.approx(130)
