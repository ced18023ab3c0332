import pytest
import torch

from smp_strategy.checkpoint.storage.dcp_format import FlatState
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor, WholeObject
from smp_strategy.checkpoint.storage.write_plan import Assigned, Offer, assign
from smp_strategy.distributed.balance import balanced_among
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle


def offers(*states):
    return [Offer.of(FlatState.of(state)) for state in states]


def held(shape, *blocks):
    return HeldTensor(
        shape=shape,
        dtype=torch.float32,
        blocks=tuple(HeldRectangle(offsets, torch.empty(sizes, device="meta")) for offsets, sizes in blocks),
    )


def written(plan):
    """Elements of each tensor that are written by each rank."""
    return [{each.name: 0 for each in share} | total(share) for share in plan.shares]


def total(share):
    found = {}
    for each in share:
        found[each.name] = found.get(each.name, 0) + each.part.numel
    return found


def test_replicas_share_what_they_have_by_bytes():
    state = {f"w{number}": held((size,), ((0,), (size,))) for number, size in enumerate([40, 10, 10, 10, 10])}
    plan = assign(offers(state, state))
    assert written(plan) == [{"w0": 40}, {"w1": 10, "w2": 10, "w3": 10, "w4": 10}]


def test_who_has_more_of_his_own_writes_less_of_what_all_have():
    common = {"w": held((8,), ((0,), (8,)))}
    plan = assign(offers({**common, "a": held((9,), ((0,), (9,)))}, common, common))
    assert written(plan) == [{"a": 9}, {"w": 8}, {}]


def test_rectangles_that_overlap_in_part_are_divided():
    plan = assign(
        offers(
            {"w": held((4, 4), ((0, 0), (3, 4)))},
            {"w": held((4, 4), ((1, 0), (3, 2)))},
            {"w": held((4, 4), ((2, 2), (2, 2)))},
        )
    )
    assert sum(each.part.numel for share in plan.shares for each in share) == 16
    assert plan.shares[0] == [Assigned("w", Rectangle((0, 0), (3, 4)), Rectangle((0, 0), (3, 4)))]


def test_elements_that_nobody_has_are_an_error():
    with pytest.raises(CheckpointError, match="`w` cannot be saved: of its 16 elements, the ranks have 12"):
        assign(offers({"w": held((4, 4), ((0, 0), (2, 4)))}, {"w": held((4, 4), ((3, 0), (1, 4)))}))
    with pytest.raises(CheckpointError, match="of its 4 elements, the ranks have 0"):
        assign(offers({"w": held((4,))}, {}))
    with pytest.raises(CheckpointError, match="of its 1 elements, the ranks have 0"):
        assign(offers({"w": held(())}))


def test_an_empty_tensor_and_one_without_dims_are_written_once():
    state = {"empty": held((0, 3), ((0, 0), (0, 3))), "number": held((), ((), ()))}
    plan = assign(offers(state, state))
    assert sorted(each.name for share in plan.shares for each in share) == ["empty", "number"]


def test_ranks_that_mean_different_things_by_a_name_are_told_so():
    with pytest.raises(CheckpointError, match=r"shape \[3\] and torch.float32 on rank 1, but shape \[2\]"):
        assign(offers({"w": held((2,), ((0,), (2,)))}, {"w": held((3,), ((0,), (3,)))}))
    with pytest.raises(CheckpointError, match="it is a tensor on some ranks, but not on all"):
        assign(offers({"w": held((2,), ((0,), (2,)))}, {"w": 3}))


def test_an_object_is_written_by_the_first_rank_that_has_it():
    plan = assign(offers({"a": {}}, {"a": {"x": 3, "y": [1]}}, {"a": {"x": 4}, "z": WholeObject({"x": {}})}))
    assert plan.objects == [[], ["a.x", "a.y"], ["z"]]
    assert plan.paths == {"a.x": ("a", "x"), "a.y": ("a", "y"), "z": ("z",)}


def test_flat_names_that_are_the_same_are_an_error():
    with pytest.raises(CheckpointError, match=r"duplicated flatten key a\.b"):
        FlatState.of({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(CheckpointError, match=r"`a\.c` is in the state"):
        FlatState.of({"a": {"b": HeldTensor.whole(torch.ones(1), aliases=("c",)), "c": 1}})


def test_shares_of_items_that_not_all_can_have_are_even():
    assert balanced_among([5, 3, 3, 2], [[0, 1], [0], [0, 1], [0, 1]], 2) == [1, 0, 0, 1]
