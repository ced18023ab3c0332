"""Hugging Face models whose layers are split, in the engine: beside stages, and by themselves."""

import pytest
import torch

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.tensor_parallel.split_layer import SplitLayer
from smp_strategy.testing import run_ranks

from .huggingface.architecture import Architecture
from .huggingface.compare import MICROBATCHES, one_process
from .huggingface.table import ARCHITECTURES

TOLERANCE = 1e-5
NAMES = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "GPTNeoXForCausalLM")
MODELS = [each for each in ARCHITECTURES if each.name in NAMES]


def on_rank(architecture: Architecture, stages: int, optimize: str) -> tuple[dict[str, torch.Tensor], int]:
    """All weights after a step, and how many layers are split."""
    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        SMPConfig(
            pipeline_parallel_degree=stages, tensor_parallel_degree=2, microbatches=MICROBATCHES, optimize=optimize
        )
    )
    engine.attach(model, [optimizer])
    result = engine.train_step(model.step, architecture.batch(model.model.config), loss_of=lambda loss: loss)
    optimizer.zero_grad()
    result.commit(torch.ones(()), reduce=True)
    optimizer.step()
    return engine.full_state_dict(), sum(isinstance(module, SplitLayer) for module in model.modules())


@pytest.mark.parametrize(("stages", "optimize"), [(1, "speed"), (2, "speed"), (2, "memory")])
@pytest.mark.parametrize("architecture", MODELS, ids=str)
def test_a_split_model_makes_the_step_of_one_process(architecture, stages, optimize):
    _, expected, _ = one_process(architecture)
    found, num_split = run_ranks(on_rank, 2 * stages, architecture, stages, optimize)[0]
    assert num_split > 10
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert difference <= TOLERANCE, name
