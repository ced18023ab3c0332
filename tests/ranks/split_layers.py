"""What tests of split layers share: a layer beside its dense twin."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.model.shard_layout import Cut

__all__ = ["assert_close", "cuts_of", "group_of_all", "random", "same_gradients", "same_parts", "sent"]

Split = Callable[[nn.Module, TensorGroup], object]


def group_of_all() -> TensorGroup:
    return TensorGroup(dist.group.WORLD)


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Relative to the largest element."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= tolerance, float(error)


def same_parts(split: nn.Module, cuts: Mapping[str, Cut], dense: nn.Module, rank: int, tolerance: float = 1e-5) -> None:
    """Whether gradients of ``split`` are the parts of those of ``dense``."""
    for (name, part), whole in zip(split.named_parameters(), dense.parameters(), strict=True):
        if whole.grad is None:
            assert part.grad is None, name
            continue
        expected = cuts[name].part(whole.grad, rank) if name in cuts else whole.grad
        assert_close(part.grad, expected, tolerance)


def cuts_of(module: nn.Module) -> dict[str, Cut]:
    """By the names of parameters."""
    return {
        f"{prefix}{'.' if prefix else ''}{name}": cut
        for prefix, layer in module.named_modules()
        for name, cut in getattr(layer, "cuts", {}).items()
    }


def same_gradients(dense: nn.Module, split: Split, x: Tensor) -> nn.Module:
    """Forward and backward of ``dense`` and of a copy that is split; returns the copy."""
    group = group_of_all()
    dense, other = copy.deepcopy(dense), copy.deepcopy(dense)
    split(other, group)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    expected, found = dense(inputs[0]), other(inputs[1])
    assert_close(found.detach(), expected.detach())
    towards = random(*expected.shape, seed=7).to(expected.dtype)
    expected.backward(towards)
    found.backward(towards)
    if x.is_floating_point():
        assert_close(inputs[1].grad, inputs[0].grad)
    same_parts(other, cuts_of(other), dense, group.rank)
    return other


@contextmanager
def sent(group: TensorGroup) -> Iterator[list[int]]:
    """How many bytes this rank puts into collectives meanwhile."""
    found, before = [0], group.sent_bytes
    yield found
    found[0] = group.sent_bytes - before
