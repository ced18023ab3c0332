"""Ranks that are stages because no degrees are given: the report says why, and what replicas would be like."""

import re

import pytest
import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

MIB = 2**20


def told(width, samples, begins="train", **options):
    """Reports about the choice of stages, in the first steps."""
    module, reports = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))), []
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(SMPConfig(**options), report=reports.append)
    engine.attach(module, [optimizer])
    batch = torch.randn(samples, width)
    if begins == "validation":
        engine.eval_step(lambda x: module(x).square().mean(), batch, kind="validation")
    if begins == "manual":  # as with a loss outside of the model
        engine.manual_step(module, batch)
    engine.train_step(lambda x: module(x).square().mean(), batch, loss_of=lambda loss: loss)
    engine.detach()
    return [text for text in reports if text.startswith("Why ")]


def same(num_ranks, *args, **options):
    """The report, which is one, and the same on all ranks."""
    found = run_ranks(told_with, num_ranks, args, options)
    assert all(len(each) == 1 and each == found[0] for each in found)
    return found[0][0]


def told_with(args, options):
    return told(*args, **options)


def test_sums_of_large_weights_are_no_faster_than_stages():
    report = same(2, 1024, 8)
    assert report.startswith("Why 2 stages: they work on one batch, as one process does. Estimated for 8 samples: ")
    assert report.endswith("Replicas, each with samples of its own, would hardly be faster.")
    # Two layers with gradients and two moments, a gradient of a weight on its way, and little else.
    memory = re.search(r", ([\d.]+) MiB on a rank", report)
    assert memory is not None
    assert float(memory[1]) == pytest.approx(2 * 4 * 4 + 4, rel=0.02)


@pytest.mark.parametrize(("num_ranks", "stages", "samples"), [(2, 2, 2048), (4, 4, 1024)])
def test_replicas_that_are_faster_are_named_with_their_options(num_ranks, stages, samples):
    report = same(num_ranks, 64, 4096, microbatches=num_ranks)
    assert report.startswith(f"Why {stages} stages: ")
    words = f"Faster for the same samples: {num_ranks} replicas with batches of {samples} samples each"
    assert f"{words} (`pipeline_parallel_degree=1`), about " in report


@pytest.mark.parametrize("begins", ["validation", "manual"])
def test_the_reason_is_told_once_whatever_step_comes_first(begins):
    assert same(2, 64, 16, begins=begins).startswith("Why 2 stages: ")


def test_a_model_that_no_rank_can_hold_is_a_reason():
    report = same(2, 1024, 8, memory_limit=f"{44 * MIB}")
    assert re.search(r"A rank that held the whole model would need 72.0 MiB of 44.0 MiB\.", report), report
    assert "Faster" not in report


def test_given_degrees_need_no_reason():
    assert run_ranks(told_with, 2, (64, 16), {"pipeline_parallel_degree": 2}) == [[], []]
    assert run_ranks(told_with, 2, (64, 16), {"smp_report": "quiet"}) == [[], []]
    assert run_ranks(told_with, 2, (64, 16), {"shard_optimizer_state": True}) == [[], []]
