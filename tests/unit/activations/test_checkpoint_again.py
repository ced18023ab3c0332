"""What is done again and what is not, what is kept for it, and what must not be changed in between."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.activations.policy import KEEP
from smp_strategy.errors import UnsupportedError
from tests.unit.activations.calls import ALL, CHEAP, WIDTH, Mlp, gradients, treated

POLICIES = pytest.mark.parametrize("policy", [ALL, CHEAP], ids=["all", "cheap"])


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


class Runs(Mlp):
    """Notes how far it gets, where nobody puts it back."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = lambda text: notes.append(text)

    def forward(self, x: Tensor) -> Tensor:
        self.notes("begin")
        y = super().forward(x)
        self.notes("middle")
        y = torch.sin(y)
        self.notes("end")
        return y * 2


def test_it_runs_once_more_and_only_as_far_as_backward_needs() -> None:
    notes: list[str] = []
    module = Runs(notes)
    treated(module)(batch()).sum().backward()
    assert notes == ["begin", "middle", "end", "begin", "middle"]


def test_nothing_is_done_again_that_no_gradient_passes_through() -> None:
    notes: list[str] = []
    module = Runs(notes)
    call = treated(module)
    with torch.no_grad():
        assert not call(batch()).requires_grad
    module.requires_grad_(False)
    assert not call(batch()).requires_grad
    module.up.requires_grad_()
    (call(batch()).sum() * 0 + module.up.weight.sum()).backward()
    assert notes.count("begin") == 4


def test_only_inputs_are_kept_and_they_are_freed_with_the_graph() -> None:
    module = nn.Sequential(Mlp(), Mlp())
    alive: list[weakref.ref[Tensor]] = []
    module[0].up.register_forward_hook(lambda m, args, out: alive.append(weakref.ref(out)))
    call = treated(module)
    x = batch().requires_grad_() * 1
    y = call(x)
    gc.disable()
    try:
        assert alive[0]() is None
        del x
        loss = y.sum()
        loss.backward()
        del y, loss
        assert [each() for each in alive] == [None, None]
        dropped = call(batch().requires_grad_() * 1)
        del dropped
        assert all(each() is None for each in alive)
    finally:
        gc.enable()


def test_an_input_that_is_changed_in_place_afterwards_is_the_error_of_autograd() -> None:
    x = batch().requires_grad_() * 1
    y = treated(Mlp())(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_that_is_changed_before_backward_is_an_error() -> None:
    module = Mlp()
    y = treated(module)(batch())
    with torch.no_grad():
        module.down.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a parameter of shape .4. of `blocks.0`"):
        y.sum().backward()


@POLICIES
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_between_forward_and_backward_does_not_matter(frozen: bool, policy: Any) -> None:
    found = []
    for chosen in (KEEP, policy):
        torch.manual_seed(0)
        module, x = Mlp(), batch().requires_grad_()
        module.up.requires_grad_(frozen)
        y = treated(module, chosen)(x)
        module.up.requires_grad_(not frozen)
        y.sum().backward()
        assert module.up.weight.requires_grad is not frozen
        found.append([gradients(module), x.grad.tolist()])
    assert found[0] == found[1]


def test_a_tensor_that_the_unit_changes_after_using_it_is_the_error_of_autograd() -> None:
    class Wrong(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(super().forward(x))
            z = y * 1
            y.add_(1)
            return torch.sin(z)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        treated(Wrong())(batch()).sum().backward()


def test_a_unit_that_changes_its_own_weights_is_refused() -> None:
    class Clamping(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(UnsupportedError, match="`blocks.0` changes its weights .one of shape .8, 4.. in its `forward`"):
        treated(Clamping())(batch())


@pytest.mark.parametrize("longer", [True, False])
def test_a_unit_that_does_something_else_the_second_time_is_an_error(longer: bool) -> None:
    class Fickle(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            second = next(turn)
            if longer:
                return super().forward(x if second else torch.sin(x))
            return super().forward(x[:1] if second else x)

    turn = iter([0, 1])
    with pytest.raises(UnsupportedError, match="`blocks.0` is computed again in backward, but does something else"):
        treated(Fickle())(batch().requires_grad_()).sum().backward()


@POLICIES
def test_an_argument_that_the_unit_itself_changes_is_found_as_it_was(policy: Any) -> None:
    class Changing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(torch.sin(x))

    found = []
    for chosen in (KEEP, policy):
        torch.manual_seed(0)
        module, x = Changing(), batch().requires_grad_()
        given = x * 1
        (treated(module, chosen, **({} if chosen is KEEP else {"changed": {0}}))(given).sum() + given.sum()).backward()
        found.append([gradients(module), x.grad.tolist()])
    assert found[0] == found[1]


@POLICIES
def test_results_may_be_changed_in_place_by_the_caller(policy: Any) -> None:
    found = []
    for chosen in (KEEP, policy):
        torch.manual_seed(0)
        module = nn.Sequential(Mlp(), nn.Linear(WIDTH, WIDTH), nn.Tanh() if chosen is policy else _TanhApart())
        treated(module, chosen)(batch()).mul_(3).pow(2).sum().backward()
        found.append(gradients(module))
    assert found[0] == found[1]


class _TanhApart(nn.Tanh):
    """Its result is not what autograd keeps, so that an ordinary call stands the change."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clone()


def test_hooks_on_gradients_fire_once() -> None:
    fired: list[str] = []
    module = Mlp()
    module.up.weight.register_hook(lambda g: fired.append("weight"))
    module.up.register_full_backward_hook(lambda m, i, o: fired.append("module"))
    module.norm.register_forward_hook(lambda m, a, out: out.register_hook(lambda g: fired.append("tensor")) and None)
    treated(module)(batch().requires_grad_()).sum().backward()
    assert sorted(fired) == ["module", "tensor", "weight"]


def test_gradients_of_gradients_pass_through() -> None:
    found = []
    for policy in (KEEP, ALL, CHEAP):
        torch.manual_seed(0)
        module, x = Mlp(), batch().requires_grad_()
        (slope,) = torch.autograd.grad(treated(module, policy)(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        found.append([gradients(module), x.grad.tolist()])
    assert found[0] == found[1] == found[2]


def test_what_is_saved_can_be_looked_at_outside_of_backward() -> None:
    x = batch().requires_grad_()
    y = treated(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))(x)
    assert torch.equal(y.grad_fn._saved_result, y)
    y.sum().backward()


def test_a_call_that_was_not_expected_to_draw_numbers_draws_the_same_again() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    y = treated(module, random=None)(torch.ones(64, WIDTH))
    y.sum().backward()
    assert torch.equal(module[0].bias.grad, (y != 0).sum(0).float() * 2)


def test_an_attribute_that_is_changed_before_backward_is_found_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    y = treated(module)(torch.ones(64, WIDTH))
    module[1].p = 0.0
    module.eval()
    y.sum().backward()
    assert torch.equal(module[0].bias.grad, (y != 0).sum(0).float() * 2)
    assert (module[1].p, module.training) == (0.0, False)


def test_without_preserve_rng_state_other_numbers_are_drawn() -> None:
    from dataclasses import replace

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    torch.manual_seed(0)
    x = torch.ones(64, WIDTH, requires_grad=True)
    y = treated(module, replace(ALL, preserve_rng_state=False))(x)
    y.sum().backward()
    kept = (y != 0).sum(0).float() * 2
    assert not torch.equal(module[0].bias.grad, kept)
