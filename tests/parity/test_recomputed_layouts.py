"""Units that are computed again, beside everything else that a layout may have: not a bit changes."""

import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

from .models import VOCABULARY

WIDTH = 16
RATE = 0.2
STEPS = 2
ALL = {"activation_checkpointing": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "each": ALL,
    "contiguous": {**ALL, "checkpoint_strategy": "contiguous"},
    "selective": {**ALL, "selective_checkpointing": True},
    "parts": {"activation_checkpointing": ("*.mlp", "*.norm")},
}
SPLIT = {"tensor_parallel_degree": 2, "tensor_parallel": {"*.mlp.0": "column", "*.mlp.3": "row"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "split layers": (2, {**SPLIT, "pipeline_parallel_degree": 1}),
    "split layers in stages": (4, {**SPLIT, "pipeline_parallel_degree": 2}),
    "split layers, stream in parts": (2, {**SPLIT, "pipeline_parallel_degree": 1, "optimize": "memory"}),
    "split layers of shards": (4, {**SPLIT, "pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}),
    "compiled": (2, {"pipeline_parallel_degree": 2, "compile": True}),
    "dealt-out state": (2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
    "half copies in stages": (2, {"pipeline_parallel_degree": 2, "bf16": True}),
    "half shards": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "bf16": True}),
    "no values": (2, {"pipeline_parallel_degree": 2, "delayed_parameter_initialization": True}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(RATE), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.norm(x)), RATE)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["tokens"])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


def trained(options: dict[str, Any], ways: list[dict[str, Any]]) -> list[Any]:
    """On a rank: losses and weights, once for each of ``ways``."""
    # The one backend that needs no C++ compiler, which takes longer than all else here.
    with warnings.catch_warnings(), mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        if "compile" in options:
            warnings.simplefilter("ignore")  # what torch.compile itself causes in torch
        return [trained_once({**options, **way}) for way in ways]


def trained_once(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with torch.device("meta" if "delayed_parameter_initialization" in options else "cpu"):
        model = Text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(SMPConfig(microbatches=2, **options))
    engine.attach(model, [optimizer])
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss, reduces=True)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
    weights = engine.saved.full_state_dict()
    engine.close()
    return losses, weights


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_bit_when_units_are_computed_again(layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    for found in run_ranks(trained, ranks, options, [{}, *WAYS.values()], timeout=110):
        (losses, weights), *others = found
        for way, (other_losses, other_weights) in zip(WAYS, others, strict=True):
            assert other_losses == losses, way
            assert other_weights.keys() == weights.keys()
            assert all(torch.equal(other_weights[name], value) for name, value in weights.items()), way
