"""Layers that write to their own weights as they compute: in one place as in one process, in shards refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel import flat_buffer
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import SMPError, UnsupportedError
from smp_strategy.testing import run_ranks


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[:4].copy_(F.normalize(self.weight[:4]))
        return super().forward(x)


class Exchanged(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


def hooked(wide: int, narrow: int) -> nn.Module:
    block = nn.Sequential(nn.Linear(wide, narrow))
    block[0].register_forward_pre_hook(shrink)
    return block


def shrink(layer: nn.Module, args: object) -> None:
    layer.weight.data.mul_(0.99)


class NormalizedLater(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class ExchangedLater(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


class ScaledLater(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.weight.data.mul_(0.5)
        return super().forward(x)


LAYERS = {"clamped": Clamped, "normalized": Normalized, "exchanged": Exchanged, "hooked": hooked}
LATER = {"normalized later": NormalizedLater, "exchanged later": ExchangedLater}

KINDS = LAYERS | LATER | {"scaled later": ScaledLater}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), KINDS[kind](8, 8), nn.Linear(8, 8)])

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


BATCH = torch.linspace(-1, 1, 32).view(4, 8)


def trained(kind: str, evaluates: bool, options: dict[str, int]) -> dict[str, Tensor]:
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = Engine(SMPConfig(**{"pipeline_parallel_degree": 1, **options}))
    engine.attach(model, [optimizer])
    if evaluates:
        engine.eval_step(model.loss, BATCH)
    for _ in range(3):
        result = engine.train_step(model.loss, BATCH, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    return copy.deepcopy(engine.saved.full_state_dict())


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_weights_are_those_of_one_process_where_one_stage_has_them(kind, num):
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        for part in BATCH.chunk(num):
            (model.loss(part) * (1 / num)).backward()
        optimizer.step()
    found = run_ranks(trained, 2, kind, False, {"pipeline_parallel_degree": 2, "microbatches": num})[0]
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_shards_are_refused_before_the_first_step(kind, evaluates):
    name = "blocks.1.0.weight" if kind == "hooked" else "blocks.1.weight"

    def on_rank():
        with pytest.raises(UnsupportedError, match=f"`{name}` is written to by its own layer"):
            trained(kind, evaluates, {"sharded_data_parallel_degree": 2})

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("threshold", [0, 10**6])
@pytest.mark.parametrize("kind", LATER)
def test_shards_are_refused_when_their_layer_begins_to_write_to_them(kind, threshold):
    def on_rank():
        options = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": threshold}
        with pytest.raises(UnsupportedError, match="`blocks.1.weight` is written to by its own layer"):
            trained(kind, False, options)

    run_ranks(on_rank, 2)


def scaled_later(threshold: int) -> str | dict[str, Tensor]:
    options = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": threshold}
    flat_buffer._FREES_PER_COMPARISON = 1  # type: ignore[misc]
    try:
        return trained("scaled later", False, options)
    except SMPError as error:
        return str(error)


def test_shards_notice_later_writes_that_versions_do_not_tell_of():
    found, other = run_ranks(scaled_later, 2, 0)  # rank 0 has all elements of this weight
    assert "`blocks.1.weight` is written to by its own layer" in found
    assert "rank 0 failed first" in other


def test_such_writes_to_shards_that_stay_gathered_are_kept():
    model = Net("scaled later")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(BATCH).backward()
        optimizer.step()
    torch.testing.assert_close(run_ranks(scaled_later, 2, 10**6)[0], dict(model.state_dict()))
