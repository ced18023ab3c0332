"""Schedules by name, their placements of chunks, and the candidates of `auto`."""

import pytest

from smp_strategy.planning.schedule.policies import Policy, candidates


def test_chunks_are_dealt_out_round_by_round():
    assert [Policy("1f1b", 2).stage_of_chunk(chunk, 3) for chunk in range(6)] == [0, 1, 2, 0, 1, 2]


def test_zb_v_goes_down_the_stages_and_up_again_so_that_the_loss_is_on_the_last_one():
    assert [Policy("zb-v", 2).stage_of_chunk(chunk, 3) for chunk in range(6)] == [2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Policy("simple"), "simple"),
        (Policy("1f1b", 3), "1f1b, 3 chunks"),
        (Policy("zb-v", 2, 4), "zb-v, 2 chunks, 4 in flight"),
    ],
)
def test_a_policy_has_a_short_text(policy, text):
    assert str(policy) == text


def test_only_layouts_with_a_unit_for_every_chunk_are_candidates():
    assert {policy.num_chunks for policy in candidates(4, 8, num_units=11)} == {1, 2}
    assert {policy.num_chunks for policy in candidates(4, 8, num_units=16)} == {1, 2, 3, 4}
    assert {policy.num_chunks for policy in candidates(4, 8, num_units=16, num_chunks=3)} == {3}


def test_a_limit_of_active_microbatches_holds_for_all_candidates():
    assert {policy.active_microbatches for policy in candidates(4, 16, num_units=8, active_microbatches=3)} == {3}


def test_one_stage_has_nothing_to_choose_but_the_order():
    assert candidates(1, 4, num_units=4) == [Policy("1f1b"), Policy("interleaved")]


def test_two_more_microbatches_than_stages_are_active_under_interleaved_by_default():
    assert Policy().most_active(4) == 6
    assert Policy(active_microbatches=1).most_active(4) == 1
