"""Training with sharded units on real ranks, against one process over the same microbatches, bit for bit.

The hooks here do what an engine will do: gather before forward and before backward, free after both, reduce when all
uses of a unit are through.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from smp_strategy.data_parallel.flat_unit import FlatUnit, ShardPolicy
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.testing import run_ranks
from tests.pieces import pieces_shown

WIDTH, WORDS, LENGTH, STEPS = 24, 50, 8, 20
ORDER = [0, 1, 2, 1]  # of the blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(11))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attention(self.norm(x)).chunk(3, -1)
        x = x + scaled_dot_product_attention(queries, keys, values, is_causal=True) * self.frozen
        return x + self.down(gelu(self.up(x)))


class GPT(nn.Module):
    """Small, with tied embeddings and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in sorted(set(ORDER)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places.weight
        for number in ORDER:
            x = self.blocks[number](x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), text.roll(-1, 1).flatten())


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def text(microbatch: int) -> Tensor:
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(microbatch))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], 3e-3, fused=True)


class Hooks:
    """What gathers, frees and reduces."""

    def __init__(self, model: GPT, shards: Collectives, *, threshold: int, prefetch: bool) -> None:
        self._prefetch = prefetch
        self._place = 0
        self._uses = [0] * len(model.blocks)
        blocks = {id(parameter) for parameter in model.blocks.parameters()}
        named = list(model.named_parameters(remove_duplicate=False))
        make = partial(
            FlatUnit,
            collectives=shards,
            device=torch.device("cpu"),
            keeping=ShardPolicy(persistence_threshold=threshold),
        )
        self.root = make([(name, parameter) for name, parameter in named if id(parameter) not in blocks])
        self.blocks = [make(block.named_parameters()) for block in model.blocks]
        self.most_bytes = 0
        for block in model.blocks:
            block.register_forward_pre_hook(self._before_forward)
            block.register_forward_hook(self._after_forward)

    @property
    def units(self) -> list[FlatUnit]:
        return [self.root, *self.blocks]

    def _use(self, place: int, following: int) -> None:
        unit = self.blocks[ORDER[place]]
        unit.gather()
        if self._prefetch and following in range(len(ORDER)):
            self.blocks[ORDER[following]].gather()
        unit.wait()
        self.most_bytes = max(self.most_bytes, sum(unit.held_bytes for unit in self.units))

    def _before_forward(self, _: nn.Module, args: tuple[Tensor]) -> None:
        self._use(self._place, self._place + 1)
        args[0].register_hook(partial(self._after_backward, ORDER[self._place]))

    def _after_forward(self, _: nn.Module, __: Any, result: Tensor) -> Tensor:
        self.blocks[ORDER[self._place]].free()
        result.register_hook(partial(self._before_backward, self._place))
        self._place = (self._place + 1) % len(ORDER)
        # Another tensor, for hooks run in the order of registration: the next block is freed before this is gathered.
        return result.view_as(result)

    def _before_backward(self, place: int, _: Tensor) -> None:
        self._use(place, place - 1)

    def _after_backward(self, number: int, _: Tensor) -> None:
        self.blocks[number].free()
        self._uses[number] += 1
        if self._uses[number] == ORDER.count(number):
            self._uses[number] = 0
            self.blocks[number].reduce()


class Report(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    resting_bytes: int
    most_bytes: int
    state_numel: int
    layouts: list[Any]


class Setting(NamedTuple):
    """How ranks are grouped."""

    ranks: int
    degree: int
    per_node: int | None = None
    accumulate: int = 1
    threshold: int = 0
    prefetch: bool = False


def groups(degree: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's shard group, of neighbours, and its replica group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = [dist.new_group(list(range(first, first + degree))) for first in range(0, world, degree)]
    replicas = [dist.new_group(list(range(first, world, degree))) for first in range(degree)]
    return shards[rank // degree], replicas[rank % degree]


def train_sharded(setting: Setting) -> Report:
    shard_group, replica_group = groups(setting.degree)
    shards = GlooCollectives(shard_group, setting.per_node, least_chunk_bytes=2048)
    replicas = GlooCollectives(replica_group)
    model = gpt()
    optimizer = adamw(model)
    hooks = Hooks(model, shards, threshold=setting.threshold, prefetch=setting.prefetch)
    losses = []
    for step in range(STEPS):
        for turn in range(setting.accumulate):
            microbatch = (step * setting.accumulate + turn) * setting.ranks + dist.get_rank()
            hooks.root.gather()
            hooks.root.wait()
            loss = model(text(microbatch))
            (loss / (setting.ranks * setting.accumulate)).backward()
            hooks.root.reduce()
            hooks.root.free()
            for block in hooks.blocks:
                block.free()
            losses.append(loss.item())
        sums = [replicas.all_reduce(shard) for unit in hooks.units for shard in unit.gradient_shards]
        for pending in sums:
            pending.wait()
        with ExitStack() as stack:
            for unit in hooks.units:
                stack.enter_context(pieces_shown(unit))
            optimizer.step()
            optimizer.zero_grad()
    resting_bytes = sum(unit.held_bytes for unit in hooks.units)
    for unit in hooks.units:
        unit.gather()
        unit.wait()
    shards.close()
    replicas.close()
    state_numel = sum(
        value.numel() for state in optimizer.state.values() for key, value in state.items() if key != "step"
    )
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Report(losses, weights, resting_bytes, hooks.most_bytes, state_numel, [unit.layout for unit in hooks.units])


def one_behind_the_other(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def in_pairs(gradients: Sequence[Tensor]) -> Tensor:
    return one_behind_the_other([first + second for first, second in zip(gradients[::2], gradients[1::2], strict=True)])


def train_plain(microbatches: int, order: Callable[[Sequence[Tensor]], Tensor]) -> tuple[list[float], GPT]:
    model = gpt()
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        found: dict[str, list[Tensor]] = {}
        for number in range(microbatches):
            model.zero_grad()
            loss = model(text(step * microbatches + number))
            (loss / microbatches).backward()
            losses.append(loss.item())
            for name, parameter in model.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found.setdefault(name, []).append(gradient)
        for name, parameter in model.named_parameters():
            parameter.grad = order(found[name]) if parameter.requires_grad else None
        optimizer.step()
    return losses, model


@pytest.mark.parametrize(
    ("setting", "order"),
    [
        (Setting(2, 2), one_behind_the_other),
        (Setting(2, 2, prefetch=True), one_behind_the_other),
        (Setting(2, 2, threshold=200), one_behind_the_other),
        (Setting(2, 2, accumulate=2), one_behind_the_other),
        (Setting(4, 4), one_behind_the_other),
        (Setting(4, 4, per_node=2, prefetch=True), in_pairs),
        (Setting(4, 2), in_pairs),
    ],
    ids=["2", "2, prefetch", "2, small stay", "2, accumulate", "4", "4 on 2 nodes", "MiCS 2x2"],
)
def test_twenty_steps_give_the_weights_of_one_process_bit_for_bit(setting, order):
    reports = run_ranks(train_sharded, setting.ranks, setting)
    losses, plain = train_plain(setting.ranks * setting.accumulate, order)
    for rank, report in enumerate(reports):
        assert report.losses == losses[rank :: setting.ranks]
        for name, weight in plain.named_parameters():
            assert torch.equal(report.weights[name], weight), name
    assert losses[-1] < losses[0]
    assert_memory(reports, setting, plain)


def assert_memory(reports: Sequence[Report], setting: Setting, plain: GPT) -> None:
    root, *blocks = reports[0].layouts
    resting = sum(layout.resting_bytes for layout in [root, *blocks])
    gathered = [layout.transient_bytes for layout in [root, *blocks]]
    at_once = 2 if setting.prefetch else 1
    for report in reports:
        assert report.resting_bytes == resting
        assert report.most_bytes == resting + gathered[0] + at_once * gathered[1]
    trained = sum(parameter.numel() for parameter in plain.parameters() if parameter.requires_grad)
    kept = sum(report.state_numel for report in reports)
    assert kept == 2 * trained * (setting.ranks // setting.degree)  # AdamW keeps two moments
    if not setting.threshold:
        parameters = sum(parameter.nbytes for parameter in plain.parameters())
        assert resting < 1.1 * parameters / setting.degree
