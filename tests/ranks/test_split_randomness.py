"""Random numbers differ between ranks inside split regions, are the same outside, and repeat themselves."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from smp_strategy.tensor_parallel.region_rng import RegionRng
from smp_strategy.testing import run_ranks
from tests.ranks.split_layers import group_of_all


class MLP(nn.Module):
    """With dropout inside, of which it keeps what is left, and after its end."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        nn.init.eye_(self.up.weight)
        self.inside, self.after = nn.Dropout(0.5), nn.Dropout(0.5)
        self.fails = fails
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(self.up(x))
        self.masks.append((y != 0).detach().clone())
        if self.fails:
            raise InterruptedError
        return self.after(self.down(y))


def split_mlp() -> tuple[MLP, TensorGroup]:
    group = group_of_all()
    torch.manual_seed(0)
    mlp = MLP()
    randomness = RegionRng(group)
    ColumnParallelLinear.from_dense(mlp.up, group, randomness=randomness)
    RowParallelLinear.from_dense(mlp.down, group, randomness=randomness)
    return mlp, group


def states(group: TensorGroup) -> list[bytes]:
    """Of the ranks' generators."""
    return group.objects(torch.get_rng_state().numpy().tobytes())


def is_same_everywhere(group: TensorGroup, value: Tensor) -> bool:
    values = group.objects(value)
    return all(torch.equal(values[0], each) for each in values)


def inside_and_outside() -> None:
    mlp, group = split_mlp()
    x = torch.ones(8, 32)
    y, again = mlp(x), mlp(x)
    assert not is_same_everywhere(group, mlp.masks[0])
    assert is_same_everywhere(group, y != 0)
    assert not torch.equal(mlp.masks[0], mlp.masks[1]), "numbers were drawn twice"
    assert not torch.equal(y != 0, again != 0)
    assert len(set(states(group))) == 1
    torch.manual_seed(1)
    first = [mlp(x), mlp.masks[-1]]
    torch.manual_seed(1)
    assert all(torch.equal(*pair) for pair in zip(first, [mlp(x), mlp.masks[-1]], strict=True))
    before = torch.get_rng_state()
    mlp.eval()(x)
    assert torch.equal(before, torch.get_rng_state()), "numbers were drawn in evaluation"


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_differ_inside_of_a_region_and_are_the_same_outside(ranks: int) -> None:
    run_ranks(inside_and_outside, ranks)


def recomputed(preserves: bool) -> None:
    mlp, group = split_mlp()
    mlp.after = nn.Identity()  # what is computed again ends inside of the region
    seen = []
    for _ in range(3):
        x = torch.ones(8, 32, requires_grad=True)
        y = checkpoint(mlp, x, use_reentrant=False, preserve_rng_state=preserves)
        y.sum().backward()
        if preserves:
            assert torch.equal(mlp.masks[-1], mlp.masks[-2])
        assert len(set(states(group))) == 1
        seen.append(mlp.masks[-2])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("preserves", [True, False])
def test_a_checkpoint_repeats_the_numbers_and_later_steps_draw_others(preserves: bool) -> None:
    run_ranks(recomputed, 2, preserves)


def interrupted() -> None:
    mlp, group = split_mlp()
    x = torch.ones(8, 32)
    mlp.fails = True
    with pytest.raises(InterruptedError):
        mlp(x)
    assert len(set(states(group))) > 1
    mlp.fails = False
    mlp(x)
    assert len(set(states(group))) == 1
    assert not torch.equal(mlp.masks[0], mlp.masks[1])
    # Once more, but somebody puts the state back: nothing may be drawn twice.
    mlp.fails = True
    with torch.random.fork_rng(), pytest.raises(InterruptedError):
        mlp(x)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    mlp.fails = False
    mlp.eval()(x)
    assert torch.equal(torch.rand(1), expected)
    mlp.train().fails = True
    with torch.random.fork_rng(), pytest.raises(InterruptedError):
        mlp(x)
    mlp.fails = False
    mlp(x)
    assert not is_same_everywhere(group, mlp.masks[-1])
    assert len(set(states(group))) == 1


def test_a_region_that_was_not_left_is_left_when_it_begins_again() -> None:
    run_ranks(interrupted, 2)


def nothing_sent() -> None:
    mlp, group = split_mlp()
    before = torch.get_rng_state()
    with group.alone():
        mlp.up(torch.ones(8, 32))
    assert torch.equal(before, torch.get_rng_state())
    twin = copy.deepcopy(mlp)
    assert twin.up.randomness is twin.down.randomness is not mlp.up.randomness
    dist.barrier()


def test_a_rank_alone_draws_nothing_and_a_copied_region_is_one_of_its_own() -> None:
    run_ranks(nothing_sent, 2)
