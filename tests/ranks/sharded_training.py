"""Training with sharded units on real ranks, and in one process over the same microbatches.

The forward of each unit is replaced by a call through :class:`GatherSchedule`, as an engine does it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_unit import FlatUnit, ShardPolicy
from smp_strategy.data_parallel.gather_schedule import GatherPolicy, GatherSchedule
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from tests.pieces import pieces_shown
from tests.ranks.sharded_models import Model, batch, made

STEPS = 5
CPU = torch.device("cpu")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Setting(NamedTuple):
    ranks: int
    degree: int
    prefetch: int = 1
    most_live: int | None = None
    gathers_once: bool = False
    threshold: int = 0
    evaluates: bool = False
    deals_out: bool = False
    reduces_early: bool = True


class Sharded:
    """A model of sharded units, on one rank."""

    def __init__(self, kind: type[Model], setting: Setting) -> None:
        shard_group, replica_group = groups(setting.degree)
        self.shards, self.replicas = GlooCollectives(shard_group), GlooCollectives(replica_group)
        self.model = made(kind)
        self.optimizer = sgd(self.model)
        self.token: object = None
        self.units = {
            name: FlatUnit(
                module.named_parameters(remove_duplicate=False),
                self.shards,
                CPU,
                keeping=ShardPolicy(persistence_threshold=setting.threshold),
                owners=self.replicas if setting.deals_out else None,
            )
            for name, module in self.model.units.items()
        }
        self.uses = GatherSchedule(
            self.units,
            self.shards,
            timing=GatherPolicy(
                gathers_once=setting.gathers_once,
                num_ahead=setting.prefetch,
                most_live=setting.most_live,
                reduces_early=setting.reduces_early,
            ),
            replicas=self.replicas,
            deals_out=setting.deals_out,
        )
        self.most_numel = 0
        self.gathers: list[str] = []
        self.reductions: list[str] = []
        for name, module in self.model.units.items():
            module.forward = partial(self._call, name, module.forward)  # type: ignore[method-assign]
            self._watch(name, self.units[name])

    @property
    def live_numel(self) -> int:
        resting = sum(unit.layout.resting_bytes for unit in self.units.values())
        return (sum(unit.held_bytes for unit in self.units.values()) - resting) // 4

    def _call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.uses.call(name, forward, args, kwargs, self.token)

    def _watch(self, name: str, unit: FlatUnit) -> None:
        gather, reduce = unit.gather, unit.reduce

        def watched_gather(**kwargs: Any) -> None:
            gather(**kwargs)
            self.gathers.append(name)
            self.most_numel = max(self.most_numel, self.live_numel)

        def watched_reduce(factor: float = 1.0) -> None:
            self.reductions.append(name)
            reduce(factor)

        unit.gather, unit.reduce = watched_gather, watched_reduce  # type: ignore[method-assign]

    def step(self) -> None:
        """Of the optimizer."""
        units = self.units.values()
        self.uses.finish_sums()
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(pieces_shown(unit))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        for unit in self.units.values():
            unit.restore()
        self.shards.close()
        self.replicas.close()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def groups(degree: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's shard group, of neighbours, and its replica group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = [dist.new_group(list(range(first, first + degree))) for first in range(0, world, degree)]
    replicas = [dist.new_group(list(range(first, world, degree))) for first in range(degree)]
    return shards[rank // degree], replicas[rank % degree]


class Report(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    most_numel: int
    gathers: list[list[str]]
    reductions: list[list[str]]


def train_sharded(kind: type[Model], setting: Setting) -> Report:
    sharded = Sharded(kind, setting)
    losses, gathers, reductions = [], [], []
    for step in range(STEPS):
        if setting.evaluates and step in (1, 3):
            with torch.no_grad():
                losses.append(sharded.model(batch(1000 + step)).item())
            sharded.uses.end_pass()
        loss = sharded.model(batch(step * setting.ranks + dist.get_rank()))
        sharded.uses.is_last = True
        (loss / setting.ranks).backward()
        sharded.uses.end_pass()
        assert sharded.live_numel == 0
        losses.append(loss.item())
        sharded.step()
        gathers.append(sharded.gathers[:])
        reductions.append(sharded.reductions[:])
        sharded.gathers.clear()
        sharded.reductions.clear()
    if setting.most_live is not None and not setting.gathers_once:
        assert sharded.uses.most_numel <= setting.most_live
    assert sharded.uses.most_numel == sharded.most_numel
    return Report(losses, sharded.weights(), sharded.most_numel, gathers, reductions)


def one_behind_the_other(gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def train_plain(kind: type[Model], setting: Setting) -> tuple[list[list[float]], dict[str, Tensor]]:
    """In one process; the losses of each rank."""
    model = made(kind)
    optimizer = sgd(model)
    losses: list[list[float]] = [[] for _ in range(setting.ranks)]
    for step in range(STEPS):
        if setting.evaluates and step in (1, 3):
            with torch.no_grad():
                value = model(batch(1000 + step)).item()
            for of_rank in losses:
                of_rank.append(value)
        found: dict[str, list[Tensor]] = {}
        for rank in range(setting.ranks):
            model.zero_grad()
            loss = model(batch(step * setting.ranks + rank))
            (loss / setting.ranks).backward()
            losses[rank].append(loss.item())
            for name, parameter in model.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found.setdefault(name, []).append(gradient)
        for name, parameter in model.named_parameters():
            of_group = [
                one_behind_the_other(found[name][first : first + setting.degree])
                for first in range(0, setting.ranks, setting.degree)
            ]
            parameter.grad = one_behind_the_other(of_group) if parameter.requires_grad else None
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


class Outcome(NamedTuple):
    """What a rank has seen, and the gradients of one step, whole."""

    seen: Any
    gradients: dict[str, Tensor]


def gradients_of(kind: type[Model], work: Callable[[Sharded], Any], setting: Setting) -> Outcome:
    sharded = Sharded(kind, setting)
    seen = work(sharded)
    for name, module in sharded.model.units.items():
        with pieces_shown(sharded.units[name]):
            for parameter in module.parameters():
                if parameter.grad is None:
                    parameter.data.zero_()
                else:
                    parameter.data.copy_(parameter.grad)
    return Outcome(seen, sharded.weights())


def plain_gradients(kind: type[Model], losses: Callable[[Model], Iterator[Tensor]]) -> dict[str, Tensor]:
    """Each loss of its own backward, one behind the other."""
    model = made(kind)
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for loss in losses(model):
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad
    return total


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
