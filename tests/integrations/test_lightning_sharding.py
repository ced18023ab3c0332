"""``sharded_data_parallel_degree`` under Lightning: the checkpoint of one process, whatever the layout."""

import pytest
from lightning_checks import CASES, assert_averages, assert_close, assert_goes_on, assert_resumed, fit
from lightning_toy import on_ranks, quiet

SHARDED = {"sharded_data_parallel_degree": 2}
FULL = {"pipeline_parallel_degree": 1, **SHARDED}
STATE = {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}
DEALT_OUT = {**FULL, "shard_optimizer_state": True}
LAYOUTS = {
    "2 shards": (2, FULL),
    "2 shards and 2 replicas of them": (4, FULL),
    "2 shards that 2 replicas deal out": (4, DEALT_OUT),
    "2 shards of 2 stages": (4, {"pipeline_parallel_degree": 2, "microbatches": 2, **SHARDED}),
}
NAMES = sorted(CASES.keys() - {"whole matrices"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_shards_have_the_checkpoint_of_one_process_with_batches_of_both(name, layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        expected, everything, _, norm = fit(tmp_path / "one", name, None)
    found = on_ranks(fit, ranks, tmp_path / "smp", name, smp)
    if name != "mixed precision":  # halves of a batch are rounded to bfloat16 apart
        assert_close(found[0][0], expected)
    assert set.union(*(kept for _, kept, _, _ in found)) == everything
    assert all(each == pytest.approx(norm, rel=1e-5) if norm else each is None for *_, each in found)


@pytest.mark.parametrize(("before", "after"), [(DEALT_OUT, FULL), (FULL, DEALT_OUT), (DEALT_OUT, DEALT_OUT)])
def test_a_checkpoint_does_not_tell_who_has_updated_which_part(before, after, tmp_path):
    assert_resumed(tmp_path, before, after, ranks=4)


@pytest.mark.parametrize(("before", "after"), [(FULL, None), (None, FULL), (FULL, FULL), (STATE, FULL), (FULL, STATE)])
def test_a_checkpoint_of_one_is_resumed_by_the_other(before, after, tmp_path):
    assert_resumed(tmp_path, before, after)


def test_averages_of_weights_are_those_of_one_process(tmp_path):
    assert_averages(tmp_path, FULL)


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["rank_zero", "none"])
def test_a_run_goes_on_with_what_another_has_left_on_some_ranks(where, layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    assert_goes_on(tmp_path, ranks, smp, where)
