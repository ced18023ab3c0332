"""Scripts whose ranks were given different settings are told so when the Accelerator is made or the model prepared."""

import os

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from smp_strategy import SMPPlugin
from smp_strategy.errors import SMPError
from smp_strategy.testing import run_ranks

REPLICAS, STAGES = {"pipeline_parallel_degree": 1}, {"pipeline_parallel_degree": 2, "microbatches": 2}


def own(values):
    return {name: each[int(os.environ["RANK"])] if isinstance(each, list) else each for name, each in values.items()}


def error_of_training(smp, options, samples, max_norms):
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loader = DataLoader(torch.randn(samples[rank], 8), batch_size=4)
    try:
        accelerator = Accelerator(cpu=True, parallelism_config=SMPPlugin(**own(smp)), **own(options))
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for batch, _ in zip(loader, range(3), strict=False):
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), max_norms[rank])
            optimizer.step()
            optimizer.zero_grad()
    except SMPError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("smp", "options", "said"),
    [
        ({**STAGES, "microbatches": [2, 4]}, {}, "`microbatches` of SMPPlugin: 2 on rank 0, 4 on rank 1"),
        ({"pipeline_parallel_degree": [2, 1]}, {}, "`pipeline_parallel_degree` of SMPPlugin: 2 on rank 0, 1 on"),
        ({**STAGES, "fp16": [True, False]}, {}, "`fp16` of SMPPlugin: True on rank 0, False on rank 1"),
        (
            {**STAGES, "loss_reduction": ["mean", "sum"]},
            {},
            "`loss_reduction` of SMPPlugin: 'mean' on rank 0, 'sum' on",
        ),
        (REPLICAS, {"gradient_accumulation_steps": [1, 2]}, "`Accelerator(gradient_accumulation_steps)`: 1 on rank 0"),
        (
            REPLICAS,
            {"mixed_precision": ["no", "bf16"]},
            "`Accelerator(mixed_precision)`: 'no' on rank 0, 'bf16'",
        ),
        (
            REPLICAS,
            {"dataloader_config": [DataLoaderConfiguration(split_batches=each) for each in (True, False)]},
            "`DataLoaderConfiguration(split_batches)`: True on rank 0, False on rank 1",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_differ_are_named_with_their_values_and_ranks(smp, options, said):
    for message in run_ranks(error_of_training, 2, smp, options, [32, 32], [1.0, 1.0], timeout=60):
        assert "The ranks of this run were given different settings" in message
        assert said in message


@pytest.mark.parametrize(
    ("smp", "samples", "max_norms", "said"),
    [
        (REPLICAS, [128, 112], [1.0, 1.0], "the number of batches of the data loader is 16 on rank 0, 14 on rank 1"),
        (REPLICAS, [32, 32], [1.0, 0.01], "to which they are clipped is 1.0 on rank 0, 0.01 on rank 1"),
        (STAGES, [32, 32], [1.0, 0.01], "to which they are clipped is 1.0 on rank 0, 0.01 on rank 1"),
    ],
)
def test_what_differs_in_a_step_is_told_at_the_next_update(smp, samples, max_norms, said):
    for message in run_ranks(error_of_training, 2, smp, {}, samples, max_norms, timeout=60):
        assert said in message


def test_ranks_with_the_same_settings_train():
    assert run_ranks(error_of_training, 2, STAGES, {}, [32, 32], [1.0, 1.0], timeout=60) == ["nothing"] * 2
