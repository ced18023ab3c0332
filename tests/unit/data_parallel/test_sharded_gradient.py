"""A piece of a gradient does element by element what the whole gradient would, and refuses everything else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.parameter_pieces import ShardedGradient
from smp_strategy.errors import UnsupportedError

START, STOP = 5, 17


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    """A parameter with a whole gradient, and one with a piece of it."""
    whole, resting = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4, 6))
    whole.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    resting.grad = ShardedGradient(resting, whole.grad.flatten()[START:STOP].clone(), start=START, is_used=True)
    return whole, resting


def clip(parameter: nn.Parameter) -> None:
    torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(4.0))


def copied_and_added(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    more = parameter.grad.clone()
    more.sub_(parameter.grad, alpha=3.0)
    parameter.grad.add_(more)


ELEMENTWISE: dict[str, Callable[[nn.Parameter], Any]] = {
    "scaled": lambda parameter: parameter.grad.mul_(2.0),
    "scaled by a tensor": lambda parameter: parameter.grad.mul_(torch.tensor(3.0)),
    "scaled, all at once": lambda parameter: torch._foreach_mul_([parameter.grad], 0.5),
    "clipped by norm": clip,
    "clipped by value": lambda parameter: torch.nn.utils.clip_grad_value_([parameter], 0.3),
    "zero": lambda parameter: torch.optim.SGD([parameter], 0.1).zero_grad(set_to_none=False),
    "made finite": lambda parameter: parameter.grad.nan_to_num_(),
    "added to a copy": copied_and_added,
}


@pytest.mark.parametrize("change", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_what_goes_element_by_element_is_done_to_the_piece(change):
    whole, resting = pair()
    change(whole)
    change(resting)
    assert isinstance(resting.grad, ShardedGradient)
    assert torch.equal(resting.grad.piece, whole.grad.flatten()[START:STOP])
    assert resting.grad.shape == (4, 6)


WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda gradient: gradient.norm(),
    "norms": lambda gradient: torch._foreach_norm([gradient]),
    "sum": lambda gradient: gradient.sum(),
    "one element": lambda gradient: gradient[0, 0],
    "transposed": lambda gradient: gradient.T,
    "with a whole tensor": lambda gradient: gradient.add_(torch.ones(4, 6)),
    "to a whole tensor": lambda gradient: torch.ones(4, 6).add_(gradient),
}


@pytest.mark.parametrize("use", WHOLE.values(), ids=WHOLE)
def test_what_looks_at_all_of_it_is_refused(use):
    _, resting = pair()
    with pytest.raises(UnsupportedError, match=r"of a gradient of shape \[4, 6\], which is spread over ranks"):
        use(resting.grad)


def test_pieces_from_different_places_are_not_mixed():
    _, resting = pair()
    other = ShardedGradient(resting, torch.ones(STOP - START), start=0, is_used=True)
    with pytest.raises(UnsupportedError, match="`add_` of a gradient"):
        resting.grad.add_(other)
    with pytest.raises(UnsupportedError, match="`_foreach_add_` of a gradient"):
        torch._foreach_add_([resting.grad], [other])
    torch._foreach_mul_([resting.grad, other], 2.0)
    assert torch.equal(other.piece, torch.full((STOP - START,), 2.0))
