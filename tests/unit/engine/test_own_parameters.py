"""Optimizers may train what the module had when it was distributed, and nothing else."""

import pytest
import torch
from torch import nn

from smp_strategy.engine.own_parameters import OwnParameters
from smp_strategy.errors import UnsupportedError


def test_parameters_of_the_module_and_frozen_tensors_are_welcome():
    module = nn.Linear(2, 2)
    own = OwnParameters(module)
    own.refuse_others([torch.optim.SGD([*module.parameters(), torch.zeros(1)], 0.1)])
    assert own.are_those_of_now()


def test_a_tensor_of_no_module_is_refused():
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), torch.ones(3, requires_grad=True)], 0.1)
    with pytest.raises(UnsupportedError, match=r"SGD trains 1 tensor \(shape \[3\]\) that the module does not have"):
        OwnParameters(module).refuse_others([optimizer])


def test_a_block_that_came_later_is_refused_by_its_name():
    module = nn.Sequential(nn.Linear(2, 2))
    own, optimizer = OwnParameters(module), torch.optim.SGD(module.parameters(), 0.1)
    module.append(nn.Linear(2, 2))
    own.refuse_others([optimizer])
    optimizer.add_param_group({"params": list(module[1].parameters())})
    assert not own.are_those_of_now()
    with pytest.raises(UnsupportedError, match=r"`1.weight` and 1 more, which the module did not have in its first"):
        own.refuse_others([optimizer])
