"""Units of any module are gathered, freed and reduced around their calls, and train as in one process bit for bit."""

from collections.abc import Sequence

import pytest
import torch

from smp_strategy.testing import run_ranks
from tests.ranks.sharded_models import MODELS, Branching, CheckpointsOutside, Model, ReentrantOutside, Skips, UsedTwice
from tests.ranks.sharded_training import STEPS, Report, Setting, train_plain, train_sharded


def assert_same(reports: Sequence[Report], kind: type[Model], setting: Setting, tolerance: float = 0.0) -> None:
    losses, weights = train_plain(kind, setting)
    for rank, report in enumerate(reports):
        assert report.losses == pytest.approx(losses[rank], rel=tolerance, abs=0)
        for name, weight in weights.items():
            torch.testing.assert_close(report.weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)


SETTINGS = {
    "2": Setting(2, 2),
    "2, not ahead": Setting(2, 2, prefetch=0),
    "2, far ahead": Setting(2, 2, prefetch=3, evaluates=True),
    "2, at once": Setting(2, 2, gathers_once=True, evaluates=True),
    "2, small stay": Setting(2, 2, threshold=50, evaluates=True),
    "4": Setting(4, 4),
    "2x2": Setting(4, 2, evaluates=True),
    "2x2, dealt out": Setting(4, 2, evaluates=True, deals_out=True),
    "2x2, dealt out, small stay": Setting(4, 2, threshold=50, deals_out=True),
}


@pytest.mark.parametrize("kind", MODELS)
def test_any_module_trains_as_in_one_process_bit_for_bit(kind):
    setting = SETTINGS["2, far ahead"]
    assert_same(run_ranks(train_sharded, setting.ranks, kind, setting), kind, setting)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [Skips, UsedTwice])
def test_no_setting_changes_a_bit(kind, name):
    assert_same(run_ranks(train_sharded, SETTINGS[name].ranks, kind, SETTINGS[name]), kind, SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_may_take_different_paths(name):
    setting = SETTINGS[name]
    reports = run_ranks(train_sharded, setting.ranks, Branching, setting)
    # What a rank reduces for others, before its own gradients are there, comes in two parts.
    assert_same(reports, Branching, setting, tolerance=1e-5)
    group = reports[: setting.degree]
    assert all(report.gathers == group[0].gathers and report.reductions == group[0].reductions for report in group)


BLOCK_NUMEL = 384
"""Of a gathered block, padding included."""


@pytest.mark.parametrize(("most_live", "prefetch", "expected"), [(1, 3, 1), (2, 3, 2), (3, 3, 3), (3, 1, 2), (9, 0, 1)])
def test_no_more_elements_are_gathered_than_allowed(most_live, prefetch, expected):
    setting = Setting(2, 2, prefetch=prefetch, most_live=most_live * BLOCK_NUMEL)
    for report in run_ranks(train_sharded, 2, Model, setting):
        assert expected - 1 < report.most_numel / BLOCK_NUMEL <= expected


def test_too_low_a_limit_is_refused():
    with pytest.raises(RuntimeError, match=r"383 elements.*`blocks\.0` has 384"):
        run_ranks(train_sharded, 2, Model, Setting(2, 2, most_live=BLOCK_NUMEL - 1))


def test_there_is_no_limit_where_all_units_are_gathered_once():
    for report in run_ranks(train_sharded, 2, Model, Setting(2, 2, most_live=1, gathers_once=True)):
        assert report.most_numel > 4 * BLOCK_NUMEL


@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_are_gathered_before_each_use_and_reduced_one_after_the_other(prefetch):
    forward = ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    for report in run_ranks(train_sharded, 2, Model, Setting(2, 2, prefetch=prefetch)):
        # From the second step on the last unit stays between forward and backward.
        assert report.gathers == [forward + forward[::-1]] + [forward + forward[-2::-1]] * (STEPS - 1)
        assert report.reductions == [forward[::-1]] * STEPS


def test_a_unit_used_several_times_is_reduced_once():
    for report in run_ranks(train_sharded, 2, UsedTwice, Setting(2, 2)):
        assert all(
            step == ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "first"] for step in report.reductions
        )


def test_repetitions_of_checkpoints_do_not_hold_up_reductions():
    for kind in (CheckpointsOutside, ReentrantOutside):
        for report in run_ranks(train_sharded, 2, kind, Setting(2, 2, prefetch=0)):
            steps = report.reductions
            assert all(step == ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "first"] for step in steps)
            # Of a region that runs again its own last unit is there, too.
            assert report.most_numel <= 2 * BLOCK_NUMEL


def test_units_can_stay_gathered_for_the_whole_step():
    for report in run_ranks(train_sharded, 2, UsedTwice, Setting(2, 2, gathers_once=True)):
        everything = ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
        assert report.gathers == [everything] * STEPS
        assert report.most_numel == 4 * BLOCK_NUMEL + report.most_numel % BLOCK_NUMEL
