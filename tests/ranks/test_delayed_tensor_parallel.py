"""Layers that are split before they have values: the values are those that the whole layers would have got."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import VOCABULARY
from tests.ranks import test_delayed as delayed
from tests.ranks.test_delayed import MICROBATCHES, Mixed, assert_same, batch, loss_of, on_meta, tensors_of

STEPS = 2
TOLERANCE = 1e-5


class Reaching(nn.Module):
    """Initialisers that ask for sizes of whole layers, and one that reaches into another layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight, std=self.up.out_features**-0.5)
        nn.init.uniform_(self.down.weight, a=0.0, b=1.0 / self.down.in_features)
        with torch.no_grad():
            self.down.bias.copy_(torch.arange(float(len(self.down.bias))) / self.down.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ByHand(nn.Module):
    """Pairs that are found in the step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Reaching(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def loss(self, given: Any) -> Tensor:
        x = self.embed(given["tokens"])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), given["tokens"].flatten())


def gpt2_with_heads() -> nn.Module:
    """Heads for four ranks; 61 tokens, of which ranks have different numbers; the head is tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 4, "vocab_size": max(61, VOCABULARY), "n_positions": 16}
    random = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return delayed.HuggingFace(GPT2LMHeadModel(GPT2Config(**sizes, **random, bos_token_id=0, eos_token_id=0)))


MODELS: dict[str, Callable[[], nn.Module]] = {"by hand": ByHand, "gpt2": gpt2_with_heads, "mixed": Mixed}


def engine_for(model: nn.Module, *optimizers: torch.optim.Optimizer, tp: int, **options: Any) -> Engine:
    config = SMPConfig(
        **{"pipeline_parallel_degree": 1, **options},
        tensor_parallel_degree=tp,
        microbatches=MICROBATCHES,
        delayed_parameter_initialization=True,
    )
    engine = Engine(config)
    engine.attach(model, optimizers)
    return engine


def train(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        result = engine.train_step(model.loss, batch(step), loss_of=loss_of)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)


def values_and_training(
    name: str, tp: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """What a model begins with, buffers included, what it is after training, and how many layers are split."""
    begun = on_meta(MODELS[name])
    engine = engine_for(begun, tp=tp, **options)
    begun.eval()
    engine.eval_step(begun.loss, batch(0))
    engine.restore_everywhere()

    model = on_meta(MODELS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = engine_for(model, optimizer, tp=tp, **options)
    train(engine, model, optimizer, range(STEPS))
    report = engine.layout.split_report
    num_split = 0 if report is None else sum(line.is_split for line in report.lines)
    engine.restore_everywhere()
    return tensors_of(begun), tensors_of(model), num_split


LAYOUTS = [
    (2, 1, {}),
    (2, 2, {}),
    (4, 1, {}),
    (2, 1, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
]


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_dense_model_in_every_layout(name):
    [(values, trained, _)] = run_ranks(values_and_training, 1, name, 1, {})
    for tp, pp, options in LAYOUTS:
        if name == "mixed" and tp == 4:
            continue  # it has two heads
        world = tp * pp * options.get("sharded_data_parallel_degree", 1)
        options = {"pipeline_parallel_degree": pp, **options}
        for found, found_trained, num_split in run_ranks(values_and_training, world, name, tp, options):
            assert_same(found, values)
            assert_same(found_trained, trained, TOLERANCE)
            assert num_split > 2
