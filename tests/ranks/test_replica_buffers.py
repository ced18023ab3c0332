"""Buffers that steps change are those of the first replica, everywhere, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.buffer_sync import BufferSync
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

STEPS, SAMPLES, WIDTH = 3, 6, 8

REP2: dict[str, Any] = {"pipeline_parallel_degree": 1, "microbatches": 2}
PP2: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "rep2": (2, REP2),
    "rep3": (3, REP2),
    "zero1": (2, {**REP2, "shard_optimizer_state": True}),
    "sdp2": (2, {**REP2, "sharded_data_parallel_degree": 2}),
    "mics2x2": (4, {**REP2, "sharded_data_parallel_degree": 2}),
    "tp2": (4, {**REP2, "tensor_parallel_degree": 2, "tensor_parallel": {"0": "column"}}),
    "pp2": (4, PP2),
    "pp2, 1f1b": (4, {**PP2, "microbatches": 3, "pipeline": "1f1b"}),
    "pp2, sdp2": (4, {**PP2, "sharded_data_parallel_degree": 2}),
}


class Codebook(nn.Module):
    """Keeps a mean that the next step computes with, and a table that never changes."""

    mean: Tensor
    table: Tensor
    age: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("age", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.ones(2, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5  # another tensor each time
            self.age += 1
        return self.lin(x - self.mean) * self.table[0]


class UncountedNorm(nn.Module):
    """Changes its statistics in a kernel that tells nobody."""

    center: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.center, self.spread, self.weight, training=self.training)


class Plain(nn.Module):
    """No statistics at all, in the beginning: a queue that appears and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            row = x.detach().mean(0, keepdim=True)
            if "queue" not in self._buffers:
                self.register_buffer("queue", row)
            else:
                self.queue: Tensor = torch.cat([self.queue, row])[-3:]
        return self.lin(x)


class InGlue(nn.Module):
    """A running mean in the code above the units."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def norms() -> nn.Module:
    lin = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), lin, nn.BatchNorm1d(WIDTH))


def uncounted_norms() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    norm.num_batches_tracked = None
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), UncountedNorm(), nn.Linear(WIDTH, WIDTH), norm)


def codebooks() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Codebook())


def queues() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Plain(), nn.Tanh(), Plain())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": norms,
    "batch norm without counters": uncounted_norms,
    "buffers that are assigned": codebooks,
    "buffers that appear and grow": queues,
    "in the glue": InGlue,
}


def batch_of(replica: int, step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(100 * replica + step))


def held(engine: Engine, model: nn.Module) -> dict[str, Tensor]:
    """The buffers of this rank's stage."""
    modules = engine.local_model.holdings.ownership.local_modules(engine.mesh.stage)
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[module]}.{key}": buffer.clone()
        for module in modules
        for key, buffer in module.named_buffers("", False)
    }


def update(engine: Engine, optimizer: torch.optim.Optimizer, model: nn.Module, step: int, *, ends: bool = True) -> None:
    batch = batch_of(engine.mesh.dp_rank, step)
    result = engine.train_step(
        lambda x: model(x).square().mean(), batch, loss_of=lambda loss: loss, continues=False, reduces=ends
    )
    result.commit(torch.ones(()), reduce=ends)
    if ends:
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        optimizer.zero_grad()


def train(name: str, options: dict[str, Any], **more: Any) -> tuple[Any, ...]:
    """The place of this rank; buffers after each step; the whole state on rank 0; and the module given back."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(SMPConfig(**options, **more))
    engine.attach(model, [optimizer])
    found = []
    for step in range(STEPS):
        update(engine, optimizer, model, step)
        found.append(held(engine, model))
    place = engine.mesh.dp_rank, engine.mesh.stage, engine.mesh.tp_rank
    state = engine.saved.full_state_dict()
    engine.detach()
    return place, found, state, {key: buffer.clone() for key, buffer in model.named_buffers()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


CASES = [("batch norm", layout) for layout in LAYOUTS]
CASES += [(name, layout) for name in list(MODELS)[1:] for layout in ("rep2", "sdp2", "pp2")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_after_each_step_every_replica_has_the_buffers_of_the_first_one(name: str, layout: str) -> None:
    world, options = LAYOUTS[layout]
    ranks = run_ranks(train, world, name, options)
    firsts = {place[1:]: found for place, found, _, _ in ranks if place[0] == 0}
    for place, found, _, _ in ranks:
        for step in range(STEPS):
            assert_equal(found[step], firsts[place[1:]][step])
    after = ranks[0][3]
    for _, _, _, restored in ranks:
        assert_equal(restored, after)
    saved = {key: value for key, value in ranks[0][2].items() if key in after}
    assert saved
    assert_equal(saved, {key: after[key] for key in saved})


@pytest.mark.parametrize("layout", ["rep2", "sdp2", "pp2"])
@pytest.mark.parametrize("name", ["batch norm", "batch norm without counters"])
def test_they_are_those_of_a_process_that_trains_with_the_samples_of_the_first_replica(name: str, layout: str) -> None:
    """Gradients do not depend on running statistics, so without updates they are the same."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for step in range(STEPS):
        for microbatch in batch_of(0, step).chunk(2):
            model(microbatch)
    world, options = LAYOUTS[layout]
    for restored in run_ranks(frozen, world, name, options):
        assert_equal(restored, dict(model.named_buffers()))


def frozen(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    for step in range(STEPS):
        update(engine, optimizer, model, step)
    engine.detach()
    return dict(model.named_buffers())


def windows(options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], Any]:
    model = norms()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    found = []
    for step in range(4):
        update(engine, optimizer, model, step, ends=step % 2 == 1)
        found.append(held(engine, model))
    return found, engine.mesh.stage


@pytest.mark.parametrize("layout", ["rep2", "sdp2"])
def test_within_an_accumulation_window_replicas_keep_their_own(layout: str) -> None:
    world, options = LAYOUTS[layout]
    (one, _), (other, _) = run_ranks(windows, world, options)
    same = [all(torch.equal(mine[key], theirs[key]) for key in mine) for mine, theirs in zip(one, other, strict=True)]
    assert same == [False, True, False, True]


def sent(name: str) -> list[int]:
    """How many bytes the replicas' buffers have taken in each step."""
    counts: list[int] = []
    broadcast = BufferSync._broadcast

    def counting(self: BufferSync, wanted: Any, device: str) -> None:
        counts[-1] += sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for _, spec in wanted)
        broadcast(self, wanted, device)

    BufferSync._broadcast = counting  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = CONSTANTS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(SMPConfig(**REP2))
    engine.attach(model, [optimizer])
    for step in range(STEPS):
        counts.append(0)
        update(engine, optimizer, model, step)
    return counts


class Masked(nn.Module):
    """Constants only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool))
        self.register_buffer("frequencies", torch.arange(64.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.frequencies[0])


def frozen_norms() -> nn.Module:
    model = norms()
    return nn.Sequential(model.eval(), nn.Linear(WIDTH, WIDTH))


CONSTANTS: dict[str, Callable[[], nn.Module]] = {
    "masks": lambda: nn.Sequential(Masked(), nn.Tanh(), Masked()),
    "norms that evaluate": frozen_norms,
    "norms": norms,
}


@pytest.mark.parametrize(("name", "num_bytes"), [("masks", 0), ("norms that evaluate", 0), ("norms", 144)])
def test_constants_do_not_travel(name: str, num_bytes: int) -> None:
    assert run_ranks(sent, 2, name) == [[num_bytes] * STEPS] * 2


def manual(options: dict[str, Any]) -> tuple[Any, list[dict[str, Tensor]]]:
    model = norms()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])

    def step(x: Tensor) -> None:
        for part in (x, x + 1.0):
            loss = model(part).square().mean()
            engine.manual.once("backward", lambda losses: engine.manual.backward(losses, 1.0), loss)
            engine.manual.once("update", apply)
        model(x * 2.0)  # statistics only, after the last update

    def apply(values: list[Any]) -> None:
        engine.manual.reduce_gradients(list(model.parameters()))
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        optimizer.zero_grad()

    found = []
    for number in range(STEPS):
        engine.manual_step(step, batch_of(engine.mesh.dp_rank, number))
        found.append(held(engine, model))
    return engine.mesh.stage, found


@pytest.mark.parametrize("layout", ["rep2", "sdp2", "pp2"])
def test_they_meet_at_the_end_of_a_manual_step(layout: str) -> None:
    world, options = LAYOUTS[layout]
    ranks = run_ranks(manual, world, options)
    for stage, found in ranks:
        first = next(theirs for other, theirs in ranks if other == stage)
        for mine, theirs in zip(found, first, strict=True):
            assert_equal(mine, theirs)
            assert all(value != 0 for name, value in mine.items() if name.endswith("tracked"))


@pytest.mark.parametrize("layout", ["rep2", "sdp2"])
def test_replicas_keep_their_own_without_broadcast_buffers(layout: str) -> None:
    world, options = LAYOUTS[layout]
    (_, _, _, one), (_, _, _, other) = run_ranks(train_alone, world, options)
    assert all(not torch.equal(one[name], other[name]) for name in one if "running" in name)


def train_alone(options: dict[str, Any]) -> tuple[Any, ...]:
    return train("batch norm", options, broadcast_buffers=False)
