"""State dicts of optimizers that have a part of the state."""

import copy
import io

import pytest
import torch
from torch import nn

from smp_strategy.data_parallel.optimizer_state import mark_own_states
from smp_strategy.engine.updates.optimizer_steps import has_step_hooks
from smp_strategy.errors import UnsupportedError


def trained() -> torch.optim.Optimizer:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mark_own_states(optimizer)
    mark_own_states(optimizer)  # every run does
    return optimizer


def test_they_refuse_to_be_written() -> None:
    for state in (trained().state_dict(), copy.deepcopy(trained().state_dict()), dict(trained().state_dict())):
        with pytest.raises(UnsupportedError, match="has the state of 2 parameters here: what this rank updates"):
            torch.save(state, io.BytesIO())
        with pytest.raises(UnsupportedError, match=r"`trainer\.save_checkpoint`"):
            torch.save({"epoch": 1, "state": state["state"].copy()}, io.BytesIO())


def test_they_can_be_kept_and_loaded_again() -> None:
    optimizer = trained()
    kept = copy.deepcopy(optimizer.state_dict())
    before = {number: state["exp_avg"].clone() for number, state in kept["state"].items()}
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    optimizer.load_state_dict(kept)
    for number, state in enumerate(optimizer.state.values()):
        assert torch.equal(state["exp_avg"], before[number])
    assert kept["param_groups"][0]["params"] == [0, 1]


class Wrapper(torch.optim.Optimizer):
    """Around another one, as Lookahead is usually written: without the constructor of its class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def test_wrappers_without_hooks_are_marked_too() -> None:
    wrapper = Wrapper(trained())
    mark_own_states(wrapper)
    mark_own_states(wrapper)
    assert not has_step_hooks(wrapper)
    assert len(wrapper._optimizer_state_dict_post_hooks) == 1
