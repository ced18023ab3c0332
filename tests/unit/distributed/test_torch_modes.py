"""torch's modes are entered where they are needed, and left as they were."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch

from smp_strategy.distributed.torch_modes import outside_inference_mode, recording

MODES: list[tuple[Callable[[], AbstractContextManager[object]], ...]] = [
    (nullcontext,),
    (torch.no_grad,),
    (torch.inference_mode,),
    (torch.inference_mode, torch.enable_grad),
]


def state() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.mark.parametrize("around", MODES)
def test_tensors_made_outside_of_inference_mode_are_ordinary_ones(around):
    with ExitStack() as stack:
        for mode in around:
            stack.enter_context(mode())
        before = state()
        with outside_inference_mode():
            made = torch.zeros(2)
        assert state() == before
    weight = torch.ones(2, requires_grad=True)
    (weight * made).sum().backward()
    torch.testing.assert_close(weight.grad, made)


@pytest.mark.parametrize("around", MODES)
def test_autograd_records_what_is_to_be_recorded(around):
    weight = torch.ones(2, requires_grad=True)
    with ExitStack() as stack:
        for mode in around:
            stack.enter_context(mode())
        before = state()
        with recording():
            doubled = weight * 2
        assert state() == before
    doubled.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((2,), 2.0))
