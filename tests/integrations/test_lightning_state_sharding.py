"""``shard_optimizer_state`` under Lightning: the weights of one process, and state on one replica only."""

import pytest
from lightning_checks import CASES, NO_HOOKS, assert_averages, assert_close, assert_resumed, fit
from lightning_toy import on_ranks, quiet

SMP = {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_have_the_checkpoint_of_one_process_with_batches_of_both(name, tmp_path):
    with quiet():
        expected, everything, _, norm = fit(tmp_path / "one", name, None)
    ranks = on_ranks(fit, 2, tmp_path / "smp", name, SMP)
    if name != "mixed precision":  # halves of a batch are rounded to bfloat16 apart
        assert_close(ranks[0][0], expected)
    assert set.union(*(kept for _, kept, _, _ in ranks)) == everything
    assert not set.intersection(*(kept for _, kept, _, _ in ranks))
    assert [seen for *_, seen, _ in ranks] == [not set(NO_HOOKS) <= set(CASES[name][0])] * 2
    assert all(found == pytest.approx(norm, rel=1e-5) if norm else found is None for *_, found in ranks)


def test_stages_of_two_replicas_have_the_checkpoint_of_one_process(tmp_path):
    name = "clipping by norm"
    with quiet():
        expected, *_ = fit(tmp_path / "one", name, None)
    smp = {**SMP, "pipeline_parallel_degree": 2, "microbatches": 2}
    assert_close(on_ranks(fit, 4, tmp_path / "smp", name, smp)[0][0], expected)


@pytest.mark.parametrize(("before", "after"), [(SMP, None), (None, SMP), (SMP, SMP)])
def test_a_checkpoint_of_one_is_resumed_by_the_other(before, after, tmp_path):
    assert_resumed(tmp_path, before, after)


def test_averages_of_weights_are_those_of_one_process(tmp_path):
    assert_averages(tmp_path, SMP)
