"""Modules of all kinds with their parameters spread over shard groups: the weights and optimizer state of one process.

Replicas read different batches. A case is a module with ``loss(batch)``, and maybe ``before(step)``, which is called
before each step.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.ranks.test_state_sharding import assert_equal

WIDTH, STEPS = 8, 4
FULL = {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def before(self, step: int) -> None:
        """Nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def with_frozen(*names: str) -> Callable[[], nn.Module]:
    """Freeze what has one of these names in its own."""

    def make() -> nn.Module:
        model = Blocks()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(f".{part}." in f".{name}." for part in names))
        return model

    return make


class Thawing(Blocks):
    """Unit after unit is unfrozen, as in fine-tuning, one of them in part; then one is frozen again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:3].requires_grad_(False)

    def before(self, step: int) -> None:
        if step == 1:
            self.blocks[2].down.requires_grad_(True)
        if step == 2:
            self.blocks[0].requires_grad_(True)
        if step == 3:
            self.blocks[3].requires_grad_(False)


class TwiceInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.down(torch.tanh(self.up(x))))


class Repeated(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        first, second, *_, last = self.blocks
        return last(first(second(first(first(x)))))


class Sometimes(Blocks):
    """A unit that one replica uses, one that is used in some steps only, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def before(self, step: int) -> None:
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        first, on_one, in_some, _ = self.blocks
        x = first(x)
        if x[0, 0] > 0:
            x = on_one(x)
        return in_some(x) if self.step % 2 else x


class TiedInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down.weight = nn.Parameter(self.down.weight.detach().T.clone())
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.up.weight).tanh(), self.down.weight.T, self.down.bias)


class TiedAcross(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm = self.blocks[1].norm


class Buffered(Block):
    """Buffers of several types, changed in a step, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("kept", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x[:, self.order] * self.kept)


class Mixed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(WIDTH, WIDTH).double()
        self.short = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.long(x.double()).float() + self.short(x.bfloat16()).float()


class Checkpointed(Block):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + checkpoint(lambda it: self.down(torch.tanh(it)), hidden, use_reentrant=self.use_reentrant)


class CheckpointsUnits(Blocks):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        x = first(x)
        for block in others:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


CASES: dict[str, Callable[[], nn.Module]] = {
    "frozen units in front": with_frozen("0", "1"),
    "a frozen unit in between": with_frozen("2"),
    "parts of all units are frozen": with_frozen("down"),
    "all weights but biases": with_frozen("weight"),
    "unfrozen and frozen between steps": Thawing,
    "parameters used twice in a unit": lambda: Blocks(TwiceInside),
    "a unit called several times": Repeated,
    "unused on a replica, in a step, ever": Sometimes,
    "tied inside a unit": lambda: Blocks(TiedInside),
    "tied across units": TiedAcross,
    "buffers": lambda: Blocks(Buffered),
    "several dtypes": lambda: Blocks(Mixed),
    "checkpoint inside, reentrant": lambda: Blocks(lambda: Checkpointed(True)),
    "checkpoint inside": lambda: Blocks(lambda: Checkpointed(False)),
    "checkpoint of units, reentrant": lambda: CheckpointsUnits(True),
    "checkpoint of units": lambda: CheckpointsUnits(False),
}
READS_VALUES = {"unused on a replica, in a step, ever"}


def made(case: str) -> tuple[Any, Optimizer]:
    torch.manual_seed(0)
    model = CASES[case]()
    return model, AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def batch(number: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    x[:, 0] = 3.0 if number % 2 else -3.0
    return x


def one_process(case: str, replicas: int, together: int, microbatches: int = 1) -> tuple[Any, Any]:
    """Each replica's batch has a backward of its own; sums are made of ``together`` of them first."""
    model, optimizer = made(case)
    trained = model.parameters
    halves = [each for each in trained() if each.dtype == torch.bfloat16]
    for step in range(STEPS):
        model.before(step)
        for each in halves:  # gradients are added up in float32
            each.grad, each.grad_dtype = None, torch.float32
        totals: list[dict[nn.Parameter, Tensor]] = []
        for replica in range(replicas):
            model.zero_grad()
            for part in batch(step * replicas + replica).chunk(microbatches):
                (model.loss(part) / microbatches).backward()
            if replica % together == 0:
                totals.append({})
            for each in trained():
                if each.grad is not None:
                    totals[-1][each] = totals[-1][each] + each.grad if each in totals[-1] else each.grad
        for each in trained():
            found = [total[each] for total in totals if each in total]
            each.grad = sum(found[1:], found[0]) / replicas if found else None
        for each in halves:
            gradient, each.grad, each.grad_dtype = each.grad, None, torch.bfloat16
            each.grad = None if gradient is None else gradient.bfloat16()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def rank(case: str, options: dict[str, Any]) -> tuple[Any, Any]:
    model, optimizer = made(case)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    for step in range(STEPS):
        model.before(step)
        number = step * engine.mesh.dp + engine.mesh.dp_rank
        result = engine.train_step(model.loss, batch(number), loss_of=lambda loss: loss, reduces=True)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    state, of_optimizer = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    engine.close()
    return state, of_optimizer


def assert_like_one_process(case: str, options: dict[str, Any], ranks: int, tolerance: float = 0.0) -> None:
    found = run_ranks(rank, ranks, case, options)[0]
    pp, degree = options["pipeline_parallel_degree"], options["sharded_data_parallel_degree"]
    state, of_optimizer = one_process(case, ranks // pp, degree, options.get("microbatches", 1))
    for name in [name for name in state if name.endswith("num_calls")]:
        assert found[0].pop(name) == state.pop(name) * pp // ranks  # each replica has its own
    assert_equal(found[0], state, tolerance=tolerance)
    # In another order: what a parameter has is put there when it is trained for the first time.
    ours, theirs = (dict(sorted(state.pop("state").items())) for state in (found[1], of_optimizer))
    assert_equal(ours, theirs, "state", tolerance)
    assert_equal(found[1], of_optimizer)


@pytest.mark.parametrize("case", CASES)
def test_two_shards_have_the_weights_and_state_of_one_process(case):
    assert_like_one_process(case, FULL, 2)


# A replica's two stages, and two shard groups of one stage.
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2, "sharded_data_parallel_degree": 2}
IN_STAGES = [
    "frozen units in front",
    "parts of all units are frozen",
    "unfrozen and frozen between steps",
    "a unit called several times",
    "unused on a replica, in a step, ever",
    "tied across units",
    "buffers",
    "several dtypes",
    "checkpoint inside, reentrant",
    "checkpoint of units",
]
IN_GROUPS = ["unfrozen and frozen between steps", "unused on a replica, in a step, ever", "several dtypes"]
LATE = ["a unit called several times", "tied across units"]


@pytest.mark.parametrize("case", IN_STAGES)
def test_two_stages_of_two_shards_have_the_weights_and_state_of_one_process(case):
    # Gradients from several segments are added up over microbatches first, and those of several stages last.
    assert_like_one_process(case, STAGES, 4, tolerance=1e-6 if case in LATE else 0.0)


@pytest.mark.parametrize("case", IN_GROUPS)
def test_two_groups_of_two_shards_have_the_weights_and_state_of_one_process(case):
    assert_like_one_process(case, FULL, 4)


def test_groups_whose_replicas_share_out_updates_have_the_weights_and_state_of_one_process():
    assert_like_one_process("unfrozen and frozen between steps", {**FULL, "shard_optimizer_state": True}, 4)


def frozen_on_one_rank(options: dict[str, Any], step: int) -> None:
    model = Blocks()
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [AdamW(model.parameters())])
    for number in range(4):
        if number == step:
            model.blocks[engine.mesh.shard_rank].up.bias.requires_grad_(False)
        engine.train_step(model.loss, batch(0), loss_of=lambda loss: loss)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("options", [FULL, STAGES])
def test_ranks_that_freeze_different_parameters_are_told(options, step):
    with pytest.raises(RuntimeError, match=r"`blocks\.[01]\.up\.bias` is frozen .* on some ranks of its shard group"):
        run_ranks(frozen_on_one_rank, 2 * options["pipeline_parallel_degree"], options, step)


def whole_tensor_optimizer_of_unfrozen() -> None:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    optimizers = [AdamW(model.blocks[1:].parameters()), Adafactor(model.blocks[0].parameters())]
    engine = Engine(SMPConfig(**FULL))
    engine.attach(model, optimizers)
    for _ in range(2):
        result = engine.train_step(model.loss, batch(0), loss_of=lambda loss: loss)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        for optimizer in optimizers:
            engine.begin_update(optimizer)
            optimizer.step()
            engine.end_update(optimizer)
        model.blocks[0].requires_grad_(True)


def test_what_is_unfrozen_may_not_have_an_optimizer_that_needs_whole_parameters():
    with pytest.raises(RuntimeError, match="Adafactor cannot update pieces of `blocks.0"):
        run_ranks(whole_tensor_optimizer_of_unfrozen, 2)
