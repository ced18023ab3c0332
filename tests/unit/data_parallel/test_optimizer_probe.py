"""What optimizers will keep, against what they keep after a step."""

import logging
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn, optim

from smp_strategy.data_parallel.optimizer_probe import optimizer_state_bytes

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Adam": optim.Adam,
    "AMSGrad": lambda p: optim.Adam(p, amsgrad=True),
    "fused AdamW": lambda p: optim.AdamW(p, fused=True),
    "foreach AdamW": lambda p: optim.AdamW(p, foreach=True),
    "Adagrad": optim.Adagrad,
    "RMSprop": optim.RMSprop,
    "centered RMSprop with momentum": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Adafactor": optim.Adafactor,
    "NAdam": optim.NAdam,
    "Rprop": optim.Rprop,
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def parameters() -> list[nn.Parameter]:
    shapes = [(), (30,), (40, 30), (8, 3, 5, 6)]
    made = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    return [*made, nn.Parameter(torch.ones(50, 20, dtype=torch.bfloat16))]


def kept(optimizer: optim.Optimizer, parameter: nn.Parameter) -> int:
    return sum(state.nbytes for state in optimizer.state[parameter].values() if isinstance(state, Tensor))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_what_was_said_before_its_first_step(name):
    trained = parameters()
    optimizer = OPTIMIZERS[name](trained)
    said = optimizer_state_bytes([optimizer])
    assert kept(optimizer, trained[2]) == 0 or name == "Adagrad"  # which makes its state at once
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert said == {id(parameter): kept(optimizer, parameter) for parameter in trained}


def test_each_group_has_its_options_and_frozen_parameters_keep_nothing():
    plain, heavy, frozen = (nn.Parameter(torch.ones(6, 4)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = optim.SGD([{"params": [plain, frozen]}, {"params": [heavy], "momentum": 0.9}], 0.1)
    assert optimizer_state_bytes([optimizer]) == {id(plain): 0, id(heavy): heavy.nbytes}


def test_asking_leaves_optimizer_schedulers_and_random_numbers_as_they_are():
    parameter = nn.Parameter(torch.ones(6, 4))
    optimizer = optim.Adam([parameter])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the twin runs hooks of the original"))
    optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `optimizer.step`
    attributes, groups, random = dict(vars(optimizer)), str(optimizer.param_groups), torch.get_rng_state()
    optimizer_state_bytes([optimizer])
    assert vars(optimizer) == attributes
    assert not optimizer.state
    assert str(optimizer.param_groups) == groups
    assert parameter.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_an_optimizer_that_cannot_be_asked_is_taken_for_one_with_two_moments(caplog):
    parameter = nn.Parameter(torch.ones(6, 4))
    with caplog.at_level(logging.DEBUG, "smp_strategy"):
        assert optimizer_state_bytes([optim.LBFGS([parameter])]) == {id(parameter): 2 * parameter.nbytes}
    assert "LBFGS cannot be asked" in caplog.text
