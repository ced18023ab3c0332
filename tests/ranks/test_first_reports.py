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
