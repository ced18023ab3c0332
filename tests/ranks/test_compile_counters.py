"""What ``compile=True`` gives torch.compile to do, by its own counters, beside a plain loop with compiled blocks."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.workloads import GPT
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

WORKLOAD = GPT(vocabulary=16, separates_ends=True, length=8, width=12, num_blocks=4)
NUM_MICROBATCHES = 4
# Full batches, and a last one with fewer samples.
SAMPLES = (8, 8, 8, 5, 8, 5)


def counts_after(steps: Sequence[Callable[[], object]]) -> list[tuple[int, int]]:
    """Graphs and frames that were compiled by the end of each step."""
    warnings.simplefilter("ignore")  # what torch.compile itself causes in torch
    counters.clear()
    found = []
    for step in steps:
        step()
        found.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    return found


def batches() -> list[Any]:
    whole = WORKLOAD.batch(NUM_MICROBATCHES)
    return [tuple(tensor[:samples] for tensor in whole) for samples in SAMPLES]


def plain() -> list[tuple[int, int]]:
    model = WORKLOAD.model()
    for part in model.parts:
        # Not `part.compile`, which leaves out modules of torch itself, such as the embedding.
        part.forward = torch.compile(part.forward, backend="aot_eager")  # type: ignore[method-assign]

    def step(batch: Any) -> None:
        for inputs, targets in zip(*(tensor.tensor_split(NUM_MICROBATCHES) for tensor in batch), strict=True):
            WORKLOAD.loss(model(inputs), targets).backward()

    return counts_after([partial(step, batch) for batch in batches()])


def ours(options: dict[str, Any]) -> list[tuple[int, int]]:
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]  # in this process only
    model: nn.Module = WORKLOAD.model()
    engine = Engine(SMPConfig(microbatches=NUM_MICROBATCHES, compile=True, **options))
    engine.attach(model)

    def step(batch: Any) -> None:
        result = engine.train_step(
            lambda parts: WORKLOAD.loss(model(parts[0]), parts[1]), batch, loss_of=lambda loss: loss
        )
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)

    return counts_after([partial(step, batch) for batch in batches()])


@pytest.mark.one_in(3)
@pytest.mark.dear
@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {"pipeline_parallel_degree": 1}), (2, {"pipeline_parallel_degree": 2})],
    ids=["one rank", "pp2"],
)
def test_no_more_is_compiled_than_by_a_plain_loop_and_nothing_after_the_first_step_of_each_size(world, options):
    (expected,) = run_ranks(plain, 1)
    for found in run_ranks(ours, world, options):
        for (graphs, frames), (most_graphs, most_frames) in zip(found, expected, strict=True):
            assert 0 < graphs <= most_graphs
            assert 0 < frames <= most_frames
        assert found[0] == found[1] == found[2]
        assert found[3] == found[4] == found[5]
