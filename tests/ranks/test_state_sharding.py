"""Each parameter is updated by one replica: the same weights as in one process, and state in one place only."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel import zero1 as state_sharding
from smp_strategy.engine.engine import Engine
from smp_strategy.model.guarded_tensors import guard_of
from smp_strategy.model.ownership import home_of
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for

STEPS, SAMPLES = 5, 4
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def of_matrices(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Looks at all of a matrix."""
    return Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=0.02)


def in_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    others = [parameter for parameter in parameters if parameter.ndim <= 1]
    return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.01}])


OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "loop": lambda parameters: AdamW(parameters, lr=0.01, foreach=False),
    "foreach": lambda parameters: AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    "groups": in_groups,
    "whole matrices": of_matrices,
    "factored": lambda parameters: Adafactor(parameters, lr=0.05),
}


def one_process(
    name: str,
    make: Make,
    replicas: int,
    microbatches: int,
    max_norm: float | None = None,
    together: int | None = None,
    steps: int = STEPS,
) -> Any:
    """What one process does that takes the replicas' batches one after the other.

    The gradients of every ``together`` replicas are added up first, then these sums; by default those of all.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = make(model.parameters())
    norms = []
    for step in range(steps):
        total: dict[nn.Parameter, Tensor] = {}
        sums: dict[nn.Parameter, Tensor] = {}
        for replica in range(replicas):
            optimizer.zero_grad()
            model.zero_grad()
            parts, sizes = split(batch_for(name, step * replicas + replica, SAMPLES), microbatches)
            for part, size in zip(parts, sizes, strict=True):
                (model.loss(part) * (size / sum(sizes))).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    sums[parameter] = sums[parameter] + parameter.grad if parameter in sums else parameter.grad
            if (replica + 1) % (together or replicas) == 0:
                total.update((each, total[each] + part if each in total else part) for each, part in sums.items())
                sums.clear()
        for parameter in model.parameters():
            parameter.grad = total[parameter] / replicas if parameter in total else None
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model.state_dict(), optimizer.state_dict(), norms


def train(
    engine: Engine,
    model: Any,
    optimizer: Optimizer,
    name: str,
    steps: range,
    max_norm: float | None,
    reduces: bool = False,
) -> list:
    norms = []
    for step in steps:
        batch = batch_for(name, step * engine.mesh.dp + engine.mesh.dp_rank, SAMPLES)
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss, reduces=reduces)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        if max_norm is not None:
            norms.append(engine.clip_grad_norm_(model.parameters(), max_norm).item())
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    return norms


def replica(name: str, kind: str, options: dict[str, Any], max_norm: float | None = None, seen: bool = False) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    engine = Engine(SMPConfig(shard_optimizer_state=True, **options))
    engine.gradients_are_seen = seen
    engine.attach(model, [optimizer])
    norms = train(engine, model, optimizer, name, range(STEPS), max_norm)
    numbers = {id(each): number for number, each in enumerate(model.parameters())}
    kept = {numbers[id(each)] for each in optimizer.state}
    state, of_optimizer = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    with_gradient = {numbers[id(each)] for each in model.parameters() if each.grad is not None}
    engine.close()
    return state, of_optimizer, norms, kept, with_gradient, engine.mesh.stage


def assert_equal(found: Any, expected: Any, where: str = "", tolerance: float = 0.0) -> None:
    """Bit for bit, through all containers."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}", tolerance)
    else:
        assert found == expected, where


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_replicas_have_the_weights_and_state_of_one_process(kind):
    ranks = run_ranks(replica, 2, "text", kind, {"pipeline_parallel_degree": 1})
    weights, state, _ = one_process("text", OPTIMIZERS[kind], 2, 1)
    assert_equal(ranks[0][0], weights)
    assert_equal(ranks[0][1], state)


# AdamW makes much of gradients that are nothing but rounding, so what is compared within a tolerance takes momentum.
LAYOUTS = [("text", 1, "foreach"), ("text", 2, "foreach"), ("gpt2, tied", 1, "foreach"), ("gpt2, tied", 2, "momentum")]


@pytest.mark.parametrize(("name", "pp", "kind"), [*LAYOUTS, ("forked", 1, "foreach"), ("forked", 2, "loop")])
def test_four_ranks_have_the_weights_and_state_of_one_process(name, pp, kind):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp}
    ranks = run_ranks(replica, 4, name, kind, options)
    weights, state, _ = one_process(name, OPTIMIZERS[kind], 4 // pp, pp)
    tolerance = 1e-6 if pp > 1 and "tied" in name else 0.0  # the stages' parts of the tied gradient are added last
    assert_equal(ranks[0][0], weights, tolerance=tolerance)
    assert_equal(ranks[0][1], state, tolerance=tolerance)


@pytest.mark.daily
@pytest.mark.parametrize("pp", [1, 2])
def test_every_parameter_has_its_state_on_one_replica(pp):
    ranks = run_ranks(replica, 4, "text", "foreach", {"pipeline_parallel_degree": pp, "microbatches": pp})
    sizes = [parameter.numel() for parameter in MODELS["text"]().parameters()]
    for stage in range(pp):
        shares = [kept for *_, kept, _, where in ranks if where == stage]
        together = [number for share in shares for number in share]
        assert len(together) == len(set(together))
        loads = [sum(sizes[number] for number in share) for share in shares]
        assert max(loads) <= sum(loads) / len(shares) + max(sizes[number] for number in together)
    assert set().union(*(kept for *_, kept, _, _ in ranks)) == set(range(len(sizes)))


def test_a_replica_lets_go_of_gradients_that_others_apply():
    for *_, kept, with_gradient, _ in run_ranks(replica, 2, "text", "foreach", {"pipeline_parallel_degree": 1}):
        assert with_gradient == kept


def test_all_replicas_keep_gradients_that_the_user_looks_at():
    options = {"pipeline_parallel_degree": 1}
    ranks = run_ranks(replica, 2, "text", "foreach", options, None, True)
    everything = set(range(len(list(MODELS["text"]().parameters()))))
    assert [with_gradient for *_, with_gradient, _ in ranks] == [everything, everything]
    assert [len(kept) < len(everything) for *_, kept, _, _ in ranks] == [True, True]
    weights, state, _ = one_process("text", OPTIMIZERS["foreach"], 2, 1)
    assert_equal(ranks[0][0], weights)
    assert_equal(ranks[0][1], state)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(("world", "pp"), [(2, 1), (4, 1), (4, 2)])
def test_clipping_goes_by_the_norm_over_all_ranks(world, pp, seen):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp}
    ranks = run_ranks(replica, world, "text", "foreach", options, 0.1, seen)
    weights, _, norms = one_process("text", OPTIMIZERS["foreach"], world // pp, pp, 0.1)
    # `clip_grad_norm_` stacks the norms as one process does; an all-reduce of gradients may add in another order.
    tolerance = 1e-6 if seen and world == 4 else 0.0
    assert all(found == pytest.approx(norms, rel=tolerance) for _, _, found, *_ in ranks)
    assert_equal(ranks[0][0], weights, tolerance=tolerance)


class Odd(nn.Module):
    """A weight that only one replica uses, one that nobody uses, a frozen one, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.blocks[2].requires_grad_(False)
        self.blocks[3].double()
        self.unused = nn.Linear(4, 4)

    def loss(self, x: Tensor) -> Tensor:
        first, sometimes, frozen, double = self.blocks
        hidden = first(x)
        if x.sum() > 0:
            hidden = sometimes(hidden)
        return double(frozen(hidden).double()).square().mean()


def odd(replicas: int) -> Any:
    """In one process or over the ranks."""
    torch.manual_seed(0)
    model = Odd()
    before = model.unused.weight.detach().clone()
    optimizer = AdamW(model.parameters(), lr=0.01)
    batches = [torch.full((2, 4), 1.0), torch.full((2, 4), -1.0)]
    if replicas == 1:
        for batch in batches:
            (model.loss(batch) / 2).backward()
        optimizer.step()
        return model.state_dict(), optimizer.state_dict(), []
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, shard_optimizer_state=True))
    engine.attach(model, [optimizer])
    result = engine.train_step(model.loss, batches[dist.get_rank()], loss_of=lambda loss: loss)
    result.commit(torch.ones(()), reduce=True)
    engine.begin_update(optimizer)
    optimizer.step()
    engine.end_update(optimizer)
    found = [torch.equal(before, model.unused.weight), model.unused.weight.grad is None]
    return engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer), found


def test_parameters_that_some_replicas_do_not_use_and_of_several_types():
    weights, state, _ = odd(1)
    ranks = run_ranks(odd, 2, 2)
    assert_equal(ranks[0][0], weights)
    assert_equal(ranks[0][1], state)
    assert [found for *_, found in ranks] == [[True, True], [True, True]]


def resumed(name: str, kind: str, options: dict[str, Any], checkpoint: Any, steps: range, world: int) -> Any:
    """Train some steps from a checkpoint; each replica reads its share of ``world`` batches a step."""
    torch.manual_seed(1)
    model = MODELS[name]()
    optimizer = OPTIMIZERS[kind](model.parameters())
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    if checkpoint is not None:
        engine.saved.load_state_dict(checkpoint[0])
        engine.saved.load_optimizer_state(optimizer, checkpoint[1])
    for step in steps:
        share = world // engine.mesh.dp
        first = step * world + engine.mesh.dp_rank * share
        batches = [batch_for(name, number, SAMPLES) for number in range(first, first + share)]
        batch = {key: torch.cat([each[key] for each in batches]) for key in batches[0]}
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    return engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)


SHARDED = {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}
OTHERS = {
    "one process": (1, {"pipeline_parallel_degree": 1, "microbatches": 4}),
    "two replicas": (2, {**SHARDED, "microbatches": 2}),
    "two stages": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "two stages of two replicas": (4, {**SHARDED, "pipeline_parallel_degree": 2, "microbatches": 2}),
}


@pytest.mark.dear
@pytest.mark.parametrize("other", OTHERS)
def test_another_layout_goes_on_from_what_four_replicas_have_saved(other):
    halfway = run_ranks(resumed, 4, "text", "momentum", SHARDED, None, range(2), 4)[0]
    expected = run_ranks(resumed, 4, "text", "momentum", SHARDED, halfway, range(2, 4), 4)[0]
    world, options = OTHERS[other]
    found = run_ranks(resumed, world, "text", "momentum", options, halfway, range(2, 4), 4)[0]
    assert_equal(found[0], expected[0], tolerance=1e-6)  # replicas' gradients are added in groups
    assert_equal(found[1], expected[1], tolerance=1e-6)


def adding_to_averages() -> list[Tensor]:
    """Nobody sets gradients to zero; the same batches in one process: their means are added up."""
    torch.manual_seed(0)
    model = MODELS["text"]()
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, shard_optimizer_state=dist.get_world_size() > 1))
    engine.attach(model)
    for step in range(3):
        share = 2 // engine.mesh.dp
        batches = [batch_for("text", 2 * step + engine.mesh.dp_rank * share + number, 4) for number in range(share)]
        batch = {key: torch.cat([each[key] for each in batches]) for key in batches[0]}
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
    return [torch.empty(0) if each.grad is None else each.grad for each in model.parameters()]


def test_what_is_added_to_averages_is_averaged_alone():
    [expected] = run_ranks(adding_to_averages, 1)
    first, second = run_ranks(adding_to_averages, 2)
    for wanted, one, other in zip(expected, first, second, strict=True):
        assert (len(one) > 0) != (len(other) > 0)
        torch.testing.assert_close(one if len(one) else other, wanted, rtol=1e-5, atol=1e-6)


def overlapping(pp: int) -> Any:
    """Which weights each block of this stage finds on their way when it is called after an update, and what is left."""
    torch.manual_seed(0)
    model = Chain()
    optimizer = SGD(model.parameters(), lr=0.1)
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=pp, shard_optimizer_state=True))
    found: dict[int, list[bool]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_sharding, "BUCKET_BYTES", 1)  # a parameter of each replica at a time
        engine.attach(model, [optimizer])

        for step in range(2):
            if step == 1:
                for number, block in enumerate(model.blocks):
                    block.note = lambda number=number: found.setdefault(number, model.arriving())
            result = engine.train_step(model.loss, torch.ones(2, 4), loss_of=lambda loss: loss)
            model.zero_grad()
            result.commit(torch.ones(()), reduce=True)
            engine.begin_update(optimizer)
            optimizer.step()
            engine.end_update(optimizer)
    engine.detach()
    kinds = {type(parameter) for parameter in model.parameters()}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    engine.close()
    return found, kinds, weights


class Block(nn.Linear):
    note: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.note is not None:
            self.note()
        return super().forward(x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4, bias=False) for _ in range(8))

    def arriving(self) -> list[bool]:
        return [guard_of(block.weight) is not None and home_of(block.weight) is None for block in self.blocks]

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("world", "pp"), [(2, 1), (4, 1), (4, 2)])
def test_the_next_forward_begins_while_new_values_travel(world, pp):
    ranks = run_ranks(overlapping, world, pp)
    assert sum(len(found) for found, *_ in ranks) == 8 * world // pp
    assert any(any(found[min(found)]) for found, *_ in ranks)  # while the first block runs
    for found, kinds, weights in ranks:
        assert not any(under_way[number] for number, under_way in found.items())
        assert not any(found[max(found)])
        assert kinds == {nn.Parameter}
        assert_equal(weights, ranks[0][2])
