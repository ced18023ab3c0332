"""Split layers beside stages, shard groups and dealt-out state: the same numbers as one process, within 1e-5.

Rows of a product are added up in another order where a layer is split, so bits differ.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks
from tests.parity.models import VOCABULARY, Block

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
STEPS = 3


class Text(nn.Module):
    """Pairs of linear layers, named by patterns; everything else is whole."""

    PATTERNS = {"*.mlp.0": "column", "*.mlp.2": "row"}

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["tokens"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batch_of(step: int, replica: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(VOCABULARY, (4, 5), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


class Setting(NamedTuple):
    tp: int
    pp: int = 1
    dp: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    microbatches: int = 2
    max_norm: float | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


def built() -> tuple[Text, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Text()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def engine_for(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    engine = Engine(
        SMPConfig(
            pipeline_parallel_degree=setting.pp,
            tensor_parallel_degree=setting.tp,
            tensor_parallel=Text.PATTERNS if setting.tp > 1 else None,
            microbatches=setting.microbatches,
            **dict(setting.options),
        )
    )
    engine.attach(model, [optimizer])
    return engine


def train(engine: Engine, model: Text, optimizer: torch.optim.Optimizer, steps: range, max_norm: float | None) -> Any:
    losses, norms = [], []
    for step in steps:
        result = engine.train_step(model.loss, batch_of(step, engine.mesh.dp_rank), loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        norms.append(engine.clip_grad_norm_(list(model.parameters()), max_norm or 1e9).item())
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses.append(result.loss.item())
    return losses, norms


def one_process(setting: Setting, steps: range, start: tuple[Text, torch.optim.Optimizer] | None = None) -> Any:
    model, optimizer = built() if start is None else start
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        of_replicas = []
        for replica in range(setting.dp):
            cut, sizes = split(batch_of(step, replica), setting.microbatches)
            total = 0.0
            for part, size in zip(cut, sizes, strict=True):
                loss = model.loss(part) * (size / sum(sizes))
                (loss / setting.dp).backward()
                total += loss.item()
            of_replicas.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), setting.max_norm or 1e9).item())
        optimizer.step()
        losses.append(of_replicas)
    return losses, norms, model.state_dict(), optimizer.state_dict()


def run_training(setting: Setting) -> Any:
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    names, identities = list(model.state_dict()), [id(each) for each in model.parameters()]
    losses, norms = train(engine, model, optimizer, range(STEPS), setting.max_norm)
    width = model.blocks[0].mlp[0].out_features
    collected = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    engine.detach()
    assert [id(each) for each in model.parameters()] == identities
    assert list(model.state_dict()) == names
    assert type(model.blocks[0].mlp[0]) is nn.Linear
    return losses, norms, width, collected, copy.deepcopy(model.state_dict())


GRID = {
    "t2": Setting(2),
    "t2 clipped": Setting(2, max_norm=0.3),
    "t4": Setting(4),
    "t2 pp2": Setting(2, pp=2, max_norm=0.3),
    "t2 dp2": Setting(2, dp=2, max_norm=0.3),
    "t2 dp2 spread": Setting(2, dp=2, options=(("placement_strategy", "spread"),)),
    "t2 sdp2": Setting(2, dp=2, options=(("sharded_data_parallel_degree", 2),), max_norm=0.3),
    "t2 sdp2 per use": Setting(
        2, dp=2, options=(("sharded_data_parallel_degree", 2), ("sdp_gather", "use")), max_norm=0.3
    ),
    "t2 zero1": Setting(2, dp=2, options=(("shard_optimizer_state", True),), max_norm=0.3),
    "t2 pp2 zbh1": Setting(2, pp=2, options=(("pipeline", "zb-h1"),)),
    "t2 pp2 measured": Setting(2, pp=2, options=(("trace_execution_times", True), ("trace_memory_usage", True))),
    "t2 pp2 v2": Setting(2, pp=2, options=(("pipeline", "1f1b"), ("virtual_pipeline_degree", 2))),
}


@pytest.mark.parametrize("name", GRID)
def test_split_layers_train_as_in_one_process(name):
    setting = GRID[name]
    ranks = run_ranks(run_training, setting.ranks, setting)
    losses, norms, state, optimizer_state = one_process(setting, range(STEPS))
    found = {tuple(rank[0]) for rank in ranks}
    expected = list(zip(*losses, strict=True))
    for of_rank in found:
        assert any(of_rank == pytest.approx(of_replica, rel=1e-5) for of_replica in expected)
    assert len(found) >= setting.dp
    for _, of_rank, width, _, whole in ranks:
        assert of_rank == pytest.approx(norms, rel=1e-5)
        assert width == 32 // setting.tp
        assert_close(whole, state)
    assert_close(ranks[0][3][0], state)
    assert_close(ranks[0][3][1], optimizer_state)
    assert all(rank[3] == ({}, {}) for rank in ranks[1:])


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE)
