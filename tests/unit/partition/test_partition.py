"""The problem read off a trace, and the decision as data."""

import pytest

from smp_strategy.partition.partition import Partition
from smp_strategy.partition.problem import FLOPS_PER_BYTE, event_work, problem_of
from smp_strategy.partition.solver import solve
from smp_strategy.trace.events import Event, Trace, Value

PARAMETERS = {"embed": {0: 100}, "a": {1: 10}, "b": {2: 20}, "head": {0: 100, 3: 5}}


def value(number: int, nbytes: int) -> Value:
    return Value(number, nbytes, True)


def trace() -> Trace:
    """embed -> a -> b -> (skip of embed) -> head; `a` is called twice."""
    e, a1, a2, b, mixed, out = (value(number, nbytes) for number, nbytes in enumerate([8, 16, 16, 32, 32, 4]))
    return Trace(
        [
            Event("unit", "embed", (), (e,), flops=0, traffic=108, saved_bytes=1),
            Event("unit", "a", (e,), (a1,), flops=1000, traffic=1, saved_bytes=10),
            Event("unit", "a", (a1,), (a2,), flops=1000, traffic=1, saved_bytes=10),
            Event("unit", "b", (a2,), (b,), flops=10, traffic=1000, saved_bytes=100),
            Event("op", "add", (b, e), (mixed,), flops=32, traffic=64, saved_bytes=7),
            Event("unit", "head", (mixed,), (out,), flops=5, traffic=0, saved_bytes=1000),
        ],
        5,
    )


def problem(**changes):
    return problem_of(trace(), PARAMETERS, **{"num_stages": 2, "memory_weight": 0.5, **changes})


def test_time_is_arithmetic_or_memory_traffic_whichever_takes_longer():
    assert event_work(trace().events)[1].forward == 1000
    assert event_work(trace().events)[3].forward == FLOPS_PER_BYTE * 1000


def test_a_unit_costs_the_sum_of_its_calls():
    units = {unit.name: unit for unit in problem().units}
    assert units["a"].time == 2000
    assert units["a"].activation_bytes == 20
    assert units["head"].parameter_bytes == 105


def test_units_stand_in_the_order_of_their_first_call():
    shuffled = {name: PARAMETERS[name] for name in ("head", "b", "a", "embed")}
    units = problem_of(trace(), shuffled, num_stages=2, memory_weight=0.5).units
    assert [unit.name for unit in units] == ["embed", "a", "b", "head"]


def test_a_cut_is_crossed_by_what_is_made_before_and_used_after():
    # Before a: e. Before b: a2 and the skip e. Before head: mixed.
    assert problem().cut_bytes == [0, 8, 24, 32]


def test_a_unit_that_the_trace_does_not_call_follows_the_one_registered_before_it():
    parameters = {"first": {7: 1}, "embed": {0: 1}, "unused": {8: 1}, "a": {1: 1}, "b": {2: 1}, "head": {3: 1}}
    found = problem_of(trace(), {**parameters, "last": {9: 1}}, num_stages=2, memory_weight=0.5)
    assert [unit.name for unit in found.units] == ["first", "embed", "unused", "a", "b", "head", "last"]
    assert {unit.time for unit in found.units if unit.name in ("first", "unused", "last")} == {0.0}


def test_a_cut_before_an_uncalled_unit_is_crossed_by_what_crosses_after_it():
    parameters = {"embed": {0: 1}, "unused": {8: 1}, "a": {1: 1}, "b": {2: 1}, "head": {3: 1}, "last": {9: 1}}
    found = problem_of(trace(), parameters, num_stages=2, memory_weight=0.5)
    assert found.cut_bytes == [0, 8, 8, 24, 32, 0]


def test_without_a_trace_parameters_alone_decide():
    found = problem_of(Trace([]), PARAMETERS, num_stages=2, memory_weight=0.2)
    assert [unit.name for unit in found.units] == list(PARAMETERS)
    # embed and head share their large parameter, but the head has one more and cannot stand with embed alone.
    assert solve(found) in ([0, 1], [0, 2], [0, 3])


def test_the_memory_weight_decides_between_balanced_memory_and_balanced_time():
    slow = {"s": {0: 1}, "t": {1: 1}, "u": {2: 98}}
    events = [
        Event("unit", name, (), (value(i, 1),), flops=flops)
        for i, (name, flops) in enumerate(zip("stu", (90, 5, 5), strict=True))
    ]
    by_time = problem_of(Trace(events), slow, num_stages=2, memory_weight=0.0)
    by_memory = problem_of(Trace(events), slow, num_stages=2, memory_weight=1.0)
    assert solve(by_time) == [0, 1]
    assert solve(by_memory) == [0, 2]


def partition() -> Partition:
    return Partition.of(problem(), solve(problem()))


def test_a_partition_is_read_back_from_its_json(tmp_path):
    assert Partition.from_json(partition().to_json()) == partition()
    partition().save(tmp_path / "deeper" / "partition.json")
    assert Partition.from_json((tmp_path / "deeper" / "partition.json").read_text()) == partition()


def test_bytes_of_a_stage_count_shared_parameters_once():
    whole = Partition.of(problem(num_stages=1), [0])
    assert whole.stage_parameter_bytes == (135,)
    assert Partition.of(problem(), [0, 3]).stage_parameter_bytes == (130, 105)
    assert whole.balance == pytest.approx(1.0)
    assert whole.stage_costs == pytest.approx((1.0,))


def test_stages_are_numbered_in_execution_order():
    placed = Partition.of(problem(), [0, 3])
    assert placed.stage_of == {"embed": 0, "a": 0, "b": 0, "head": 1}
    assert placed.num_stages == 2
    assert placed.cut_bytes == (32,)
