"""SageMaker's tree partitioning, against examples worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.model.trace.work import Work
from smp_strategy.planning.partition.problem import HeldBytes, UnitCost
from smp_strategy.planning.partition.sagemaker_tree import (
    PartitionNode,
    d_hondt,
    in_execution_order,
    module_tree,
    segments,
    tree_partition,
)


def unit(name: str, cost: float, **parameters: int) -> UnitCost:
    return UnitCost(name, {ord(key): HeldBytes(size) for key, size in parameters.items()}, work=Work(cost))


def test_devices_go_where_the_cost_per_device_is_largest():
    # 0.8, 0.4, 0.267, 0.2, 0.16, 0.133, 0.114, and then 0.1 three times: the first segment is first.
    assert [len(devices) for devices in d_hondt([0.1, 0.8, 0.1], 8)] == [1, 7, 0]


def test_seats_are_given_one_after_the_other():
    # 6, 3 | 4 -> 0: 6, 1: 4, 0: 3; then 2 of the first against 2 of the second.
    assert d_hondt([6.0, 4.0], 4) == [[0, 2, 3], [1]]


def test_a_segment_gets_no_more_devices_than_it_has_leaves():
    assert [len(devices) for devices in d_hondt([0.1, 0.8, 0.1], 4, most=[2, 1, 2])] == [2, 1, 1]


@pytest.mark.parametrize(
    ("costs", "count", "starts"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([5, 1, 1, 1], 2, [0, 1]),
        ([1, 2, 3, 4, 5], 3, [0, 3, 4]),
        ([1, 2], 1, [0]),
    ],
)
def test_segments_have_the_smallest_largest_sum(costs, count, starts):
    assert segments(costs, count) == starts


def test_children_of_the_root_are_divided_and_a_child_with_several_devices_divides_its_own():
    # 0.2 + 0.8: the encoder gets device 0 (0.8), then 1 (0.4), then 2 (0.267); the embedding 3 would be its 0.2: tie
    # of the fourth seat goes to the first segment.
    units = [unit("embed", 2), *(unit(f"encoder.{i}", 2) for i in range(4))]
    found = tree_partition(module_tree(units), 4, 0.0)
    assert found["embed"] == 3
    # Three devices for four equal layers: segments of 1, 1 and 2; the largest one gets the first device.
    assert [found[f"encoder.{i}"] for i in range(4)] == [1, 2, 0, 0]


def test_a_segment_without_a_device_goes_to_the_first_one_of_its_parent():
    units = [unit("a", 1), unit("b.0", 40), unit("b.1", 40), unit("c", 1)]
    # Two segments, [a, b] and [c] or [a] and [b, c], of equal cost; both devices go to the one with `b`.
    found = tree_partition(module_tree(units), 2, 0.0)
    assert found["b.0"] != found["b.1"]
    assert found["a"] == found["c"] == 0


def test_units_that_share_parameters_stay_together():
    units = [unit("embed", 1, t=9), unit("blocks.0", 5), unit("blocks.1", 5), unit("head", 1, t=9)]
    tree = module_tree(units)
    assert tree.children[0] == PartitionNode("embed", ("embed", "head"), 9, 2)
    found = tree_partition(tree, 3, 0.5)
    assert found["embed"] == found["head"]


def test_the_memory_weight_decides_what_is_balanced():
    units = [unit("a", 8), unit("b", 1, x=1), unit("c", 1, y=8)]
    tree = module_tree(units)
    by_work, by_memory = (tree_partition(tree, 2, weight) for weight in (0.0, 1.0))
    assert by_work["b"] == by_work["c"] != by_work["a"]
    assert by_memory["a"] == by_memory["b"] != by_memory["c"]


def test_stages_are_numbered_as_they_are_visited():
    assert in_execution_order({"a": 2, "b": 0, "c": 2, "d": 1}, "abcd") == {"a": 0, "b": 1, "c": 0, "d": 2}


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=12), st.integers(1, 12), st.floats(0, 1))
def test_every_unit_has_a_stage_and_every_stage_a_unit(costs, num_devices, weight):
    num_devices = min(num_devices, len(costs))
    units = [unit(f"{'ab'[i % 3 == 0]}.{i}" if i % 2 else f"u{i}", cost) for i, cost in enumerate(costs)]
    found = tree_partition(module_tree(units), num_devices, weight)
    assert set(found) == {each.name for each in units}
    assert set(found.values()) == set(range(num_devices))
