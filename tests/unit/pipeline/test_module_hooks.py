"""Hooks that make weights run with the unit, and are given back."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.wrapping.module_hooks import (
    hide_weight_hooks,
    refuse_new_weight_hooks,
    show_weight_hooks,
    with_weight_hooks,
)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(4, 4)
    made.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    prune.l1_unstructured(made, "weight", 0.5)
    return made


def test_they_are_hidden_and_run_before_the_forward():
    expected, module, x = layer(), layer(), torch.ones(2, 4)
    forward = with_weight_hooks(module, module.forward, hide_weight_hooks(module))
    with torch.no_grad():
        expected.weight_orig.neg_()
        module.weight_orig.neg_()
    assert len(module._forward_pre_hooks) == 2  # of the user, and a stand-in that computes nothing
    assert torch.equal(forward(x + 1), expected(x))
    assert not torch.equal(module(x), layer()(x))


def test_they_are_given_back_with_what_has_come_since():
    module = layer()
    before = dict(module._forward_pre_hooks)
    hidden = hide_weight_hooks(module)
    handle = module.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    show_weight_hooks(module, hidden)
    assert set(module._forward_pre_hooks) == {*before, handle.id}
    prune.remove(module, "weight")
    assert (module.weight == 0).sum() == 8
    assert len(module._forward_pre_hooks) == 2


@pytest.mark.parametrize("hooks", [[], [lambda module, args: None]])
def test_other_hooks_stay(hooks):
    module = nn.Linear(4, 4)
    for hook in hooks:
        module.register_forward_pre_hook(hook)
    before = dict(module._forward_pre_hooks)
    hidden = hide_weight_hooks(module)
    assert hidden == {}
    assert dict(module._forward_pre_hooks) == before
    show_weight_hooks(module, hidden)
    assert dict(module._forward_pre_hooks) == before


PUT_ON = {
    "WeightNorm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "SpectralNorm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "RandomUnstructured": (
        lambda module: prune.random_unstructured(module, "weight", 0.5),
        lambda module: prune.remove(module, "weight"),
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", PUT_ON)
def test_they_neither_come_nor_go_while_units_are_distributed(kind):
    put_on, take_off = PUT_ON[kind]
    old, new = put_on(nn.Linear(4, 4)), nn.Linear(4, 4)
    units = {"old": old, "new": new}
    hidden = {name: hide_weight_hooks(unit) for name, unit in units.items()}
    refuse_new_weight_hooks(units)
    with pytest.raises(UnsupportedError, match=f"{kind} was to be removed from a Linear after the first step"):
        take_off(old)
    put_on(new)
    with pytest.raises(UnsupportedError, match=f"{kind} was put on `new` after the first step"):
        refuse_new_weight_hooks(units)
    for name, unit in units.items():
        show_weight_hooks(unit, hidden[name])
        take_off(unit)
        assert not unit._forward_pre_hooks
