"""Gradients are handed over in the order of one process, whatever happens to the loss on its way to backward."""

import pytest
import torch
from torch import nn

from smp_strategy.engine.step_results import TrainStep, accumulating
from smp_strategy.errors import UnsupportedError


class NoReduction:
    def begin_backward(self, averaged):
        assert not averaged


def step_with(parameter, gradients, *, factor, continues):
    with accumulating([parameter], continues=continues) as accumulated:
        for gradient in gradients:
            (parameter * (gradient * factor)).sum().backward()
    return TrainStep([], (), None, accumulated, factor, NoReduction())


def parameter_with(gradient):
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = gradient
    return parameter


GRADIENTS = [torch.tensor([1e-8, 1.0, 3.0]), torch.tensor([1.0, 1e-8, 0.1]), torch.tensor([-1.0, -1.0, 0.7])]


def test_earlier_gradients_are_continued_one_by_one():
    parameter = parameter_with(GRADIENTS[0].clone())
    step = step_with(parameter, GRADIENTS[1:], factor=1.0, continues=True)
    assert torch.equal(parameter.grad, GRADIENTS[0])  # until it is handed over
    step.commit(torch.tensor(1.0), reduce=False)
    assert torch.equal(parameter.grad, (GRADIENTS[0] + GRADIENTS[1]) + GRADIENTS[2])


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("given", [0.5, 0.25])
def test_a_wrong_guess_of_the_factor_is_made_good(given, continues):
    parameter = parameter_with(GRADIENTS[0].clone())
    step_with(parameter, GRADIENTS[1:], factor=0.5, continues=continues).commit(torch.tensor(given), reduce=False)
    torch.testing.assert_close(parameter.grad, GRADIENTS[0] + given * (GRADIENTS[1] + GRADIENTS[2]))


def test_gradients_that_were_set_to_none_in_between_do_not_come_back():
    parameter = parameter_with(GRADIENTS[0].clone())
    step = step_with(parameter, GRADIENTS[1:], factor=1.0, continues=True)
    parameter.grad = None
    step.commit(torch.tensor(1.0), reduce=False)
    torch.testing.assert_close(parameter.grad, GRADIENTS[1] + GRADIENTS[2])


def test_gradients_that_were_changed_in_place_in_between_are_refused():
    parameter = parameter_with(GRADIENTS[0].clone())
    step = step_with(parameter, GRADIENTS[1:], factor=1.0, continues=True)
    parameter.grad.mul_(2)
    with pytest.raises(UnsupportedError, match="changed in place between `training_step` and `backward`"):
        step.commit(torch.tensor(1.0), reduce=False)
