"""What is said once, at the first training step, on ranks with stages."""

import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks


def reported(microbatches):
    """What is reported of three steps, the first of them an evaluation."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    module, batch, reports = nn.Sequential(*blocks), torch.randn(8, 4), []
    config = SMPConfig(pipeline_parallel_degree=2, microbatches=microbatches)
    engine = Engine(config, report=reports.append)
    engine.attach(module)
    module.eval()
    engine.eval_step(lambda x: module(x).sum(), batch, kind="val")
    assert not any("BatchNorm" in text for text in reports)
    module.train()
    for _ in range(2):
        result = engine.train_step(lambda x: module(x).square().mean(), batch, loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
    engine.detach()
    return [text for text in reports if "normalize by the statistics of each microbatch" in text]


def test_statistics_of_microbatches_are_told_once():
    for found in run_ranks(reported, 2, 4):
        assert len(found) == 1
        assert found[0].startswith("Layers like `0.1` (BatchNorm1d) and 1 more normalize by the statistics of each")


def test_nothing_is_told_of_a_single_microbatch():
    assert run_ranks(reported, 2, 1) == [[], []]


def told(smp_report, microbatches=4):
    """Reports of three training steps, after each of them."""
    module, batch, reports = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), torch.randn(8, 1024), []
    options = {"pipeline_parallel_degree": 2, "microbatches": microbatches, "smp_report": smp_report}
    engine = Engine(SMPConfig(**options, pipeline="1f1b"), report=reports.append)
    engine.attach(module)
    numbers = []
    for _ in range(3):
        result = engine.train_step(lambda x: module(x).square().mean(), batch, loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
        numbers.append(len(reports))
    engine.detach()
    return numbers, reports


def test_the_first_step_has_one_report_that_is_the_same_on_all_ranks():
    (numbers, (report,)), (_, (other,)) = run_ranks(told, 2, "short")
    assert numbers == [1, 1, 1]
    assert report == other
    lines = report.splitlines()
    assert lines[0] == "Process mesh: 2 ranks = pp 2 x dp 1"
    assert "stage 1   F0 B0 F1 B1 F2 B2 F3 B3" in lines
    assert any(line.startswith("What would help most: `") for line in lines)
    assert " measured (forward and backward)." in report


def test_whole_batches_that_the_user_wants_are_not_talked_out_of():
    """A loss that compares samples needs them; only the sentence before the first step knows nothing of the loss."""
    (_, (first, report)) = run_ranks(told, 2, "short", 1)[0]
    assert first.startswith("`microbatches` is 1: ")
    assert first.endswith("unless the loss compares samples of its batch, or a norm needs all of them.")
    assert "`microbatches=" not in report


def test_a_quiet_run_reports_nothing_and_a_full_one_everything():
    assert run_ranks(told, 2, "quiet")[0] == ([0, 0, 0], [])
    _, reports = run_ranks(told, 2, "full")[0]
    for part in (", placement DPT", "sends on", "Large tensors travel", "A training step sees", "More: `smp_report"):
        assert sum(part in text for text in reports) == 1, part
