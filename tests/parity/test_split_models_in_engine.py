"""Hugging Face models whose layers are split, in the engine: beside stages, and by themselves."""

from typing import Any

import pytest
import torch

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.tensor_parallel.layers.base import SplitLayer
from smp_strategy.testing import run_ranks

from .huggingface.architecture import Architecture
from .huggingface.compare import MICROBATCHES, one_process
from .huggingface.table import ARCHITECTURES

TOLERANCE = 1e-5
NAMES = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "GPTNeoXForCausalLM")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "no stages": (1, {}),
    "2 stages": (2, {}),
    "2 stages, stream in parts": (2, {"optimize": "memory"}),
    "samples of their own": (1, {"prescaled_batch": False}),
    "2 stages, samples of their own": (2, {"prescaled_batch": False}),
    "samples of their own, stream in parts": (1, {"prescaled_batch": False, "optimize": "memory"}),
}
MODELS = [each for each in ARCHITECTURES if each.name in NAMES]


def on_rank(architecture: Architecture, stages: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """All weights after a step, and how many layers are split."""
    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(
        SMPConfig(
            pipeline_parallel_degree=stages,
            tensor_parallel_degree=2,
            microbatches=MICROBATCHES,
            loss_weighting="samples",
            **options,
        )
    )
    engine.attach(model, [optimizer])
    batch = architecture.batch(model.model.config)
    if not engine.config.prescaled_batch:
        mine = slice(1) if engine.mesh.tp_rank == 0 else slice(1, None)
        batch = {key: value[mine] for key, value in batch.items()}
    result = engine.train_step(model.step, batch, loss_of=lambda loss: loss)
    if not engine.config.prescaled_batch:
        assert engine.layout.split_report.streams
        assert engine.layout.split_report.stream_dim == (engine.config.optimize == "memory")
    optimizer.zero_grad()
    result.commit(torch.ones(()), reduce=True)
    optimizer.step()
    return engine.saved.full_state_dict(), sum(isinstance(module, SplitLayer) for module in model.modules())


@pytest.mark.dear
@pytest.mark.parametrize(("stages", "options"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("architecture", MODELS, ids=str)
def test_a_split_model_makes_the_step_of_one_process(architecture, stages, options):
    _, expected, _ = one_process(architecture)
    found, num_split = run_ranks(on_rank, 2 * stages, architecture, stages, options)[0]
    assert num_split > 10
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)
        assert difference <= TOLERANCE, name
