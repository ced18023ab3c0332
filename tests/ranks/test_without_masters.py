"""``bf16=True`` on models that are of half precision already: frozen parameters may be so, trained ones may not."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for
from tests.ranks.half_precision import ByHand
from tests.ranks.test_state_sharding import SAMPLES, assert_equal

PP1: dict[str, Any] = {"pipeline_parallel_degree": 1}
PP2: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2}
SDP2: dict[str, Any] = {**PP1, "sharded_data_parallel_degree": 2}
ZERO1: dict[str, Any] = {**PP1, "shard_optimizer_state": True}


class Adapted(nn.Module):
    """A linear layer of half precision, frozen, with a trained correction of low rank in float32."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.to(dtype).requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class OnAFrozenModel(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16).to(dtype).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(nn.Linear(16, 16), dtype) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False).to(dtype).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        hidden = self.embed(batch["tokens"])
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


UNITS = ["embed", *(f"layers.{number}" for number in range(4)), "head"]


def adapted(options: dict[str, Any], dtype: torch.dtype) -> Any:
    model = OnAFrozenModel(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = SGD(trained, 0.5)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    assert [unit.name for unit in engine.layout.units] == UNITS
    for step in range(3):
        result = engine.train_step(model.loss, batch_for("text", step, SAMPLES), loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    state = engine.saved.full_state_dict()
    engine.close()
    return state


@pytest.mark.parametrize(
    ("world", "options"), [(1, PP1), (2, PP2), (2, SDP2), (2, ZERO1)], ids=["one rank", "pp2", "sdp2", "zero1"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_in_float32_are_trained_on_a_model_that_is_frozen_in_half_precision(dtype, world, options):
    model = OnAFrozenModel(dtype)
    before = copy.deepcopy(model.state_dict())
    by_hand = ByHand(model, UNITS, torch.bfloat16)
    optimizer = SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.5)
    for step in range(3):
        optimizer.zero_grad()
        for part in (0, 1) if options is PP2 else (None,):
            batch = batch_for("text", step, SAMPLES)
            half = slice(None) if part is None else slice(part * SAMPLES // 2, (part + 1) * SAMPLES // 2)
            by_hand.backward({key: value[half] for key, value in batch.items()}, 1.0 if part is None else 0.5)
        optimizer.step()
    found = run_ranks(adapted, world, {**options, "bf16": True}, dtype)[0]
    assert_equal(found, model.state_dict())  # replicas have read the same samples
    assert found["head.weight"].dtype == dtype
    assert torch.equal(found["head.weight"], before["head.weight"])
    assert not torch.equal(found["layers.0.down.weight"], before["layers.0.down.weight"])


def trains_halves(precision: str, dtype: torch.dtype, when: str) -> None:
    torch.manual_seed(0)
    model = MODELS["text"]()
    model.blocks[1].to(dtype)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, **{precision: True}))
    batch = batch_for("text", 0, SAMPLES)
    if when == "at once":
        engine.attach(model, [SGD(model.parameters(), 0.1)])
        raise AssertionError("it was taken on")
    if when == "unfrozen":
        model.blocks[1].requires_grad_(False)
    engine.attach(model)
    engine.eval_step(model.loss, batch)
    if when == "unfrozen":
        engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        model.blocks[1].mlp.requires_grad_(True)
    engine.train_step(model.loss, batch, loss_of=lambda loss: loss)


@pytest.mark.parametrize(
    ("precision", "dtype", "instead"),
    [
        ("bf16", torch.bfloat16, "bf16-true"),
        ("bf16", torch.float16, "16-true"),
        ("fp16", torch.float16, "16-true"),
        ("fp16", torch.bfloat16, "bf16-true"),
    ],
)
def test_what_is_trained_in_half_precision_is_refused(precision, dtype, instead):
    pattern = rf"`blocks\.1\.norm\.weight` \(and 5 more\) is trained, but is {str(dtype)[6:]} .*`{precision}=True`"
    with pytest.raises(RuntimeError, match=rf"ConfigError.*{pattern} .*`precision='{instead}'`"):
        run_ranks(trains_halves, 2, precision, dtype, "at once")


def test_it_may_be_looked_at_until_it_is_trained():
    with pytest.raises(RuntimeError, match=r"train_step(?s:.*)`blocks\.1\.norm\.weight` \(and 5 more\) is trained"):
        run_ranks(trains_halves, 2, "bf16", torch.bfloat16, "later")


def test_it_may_be_frozen_until_it_is_trained():
    with pytest.raises(RuntimeError, match=r"train_step(?s:.*)`blocks\.1\.mlp\.0\.weight` \(and 3 more\) is trained"):
        run_ranks(trains_halves, 2, "bf16", torch.bfloat16, "unfrozen")
