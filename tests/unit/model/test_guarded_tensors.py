"""Guarded tensors: metadata is answered, values come first or the use is refused, and guards nest."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import Guard, guard_of, placeholder, unwatch, watch
from smp_strategy.model.ownership import HomeStages, HookAccess, bring_back, send_away

VALUES = torch.arange(6.0).reshape(2, 3)


class Fetched(Guard):
    """Guard that fetches the values of one parameter, or refuses."""

    def __init__(self, parameter: nn.Parameter, *, can_lift: bool = True) -> None:
        self.parameter = parameter
        self.is_lifted = False
        self._can_lift = can_lift

    @property
    def can_lift(self) -> bool:
        return self._can_lift

    def lift(self) -> None:
        self.is_lifted = True
        unwatch(self.parameter)
        self.parameter.data = VALUES.clone()

    def refusal(self, operation: str) -> UnsupportedError:
        return UnsupportedError(f"`{operation}` refused")


def guarded(*, can_lift: bool = True) -> tuple[nn.Parameter, Fetched]:
    parameter = nn.Parameter(placeholder(VALUES.shape, VALUES.dtype, VALUES.device))
    guard = Fetched(parameter, can_lift=can_lift)
    watch(parameter, guard)
    return parameter, guard


USES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda tensor: tensor + 1,
    "sum": lambda tensor: torch.sum(tensor),
    "stack": lambda tensor: torch.stack([tensor, tensor]),
    "data": lambda tensor: tensor.data,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "tolist": lambda tensor: tensor.tolist(),
    "repr": repr,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_comes_after_the_values(use: Callable[[Tensor], object]) -> None:
    parameter, guard = guarded()
    use(parameter)
    assert guard.is_lifted
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, VALUES)


@pytest.mark.parametrize("name", USES)
def test_a_use_without_values_is_refused_by_its_name(name: str) -> None:
    parameter, guard = guarded(can_lift=False)
    with pytest.raises(UnsupportedError, match=f"`{name}` refused"):
        USES[name](parameter)
    assert guard_of(parameter) is guard


def test_metadata_needs_no_values() -> None:
    parameter, guard = guarded(can_lift=False)
    assert parameter.shape == VALUES.shape
    assert parameter.dtype == VALUES.dtype
    assert len(parameter) == 2
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.grad is None
    parameter.grad = torch.ones_like(VALUES)
    assert parameter.grad is not None
    assert not guard.is_lifted


def test_a_copy_has_the_values() -> None:
    parameter, _ = guarded()
    copied = copy.deepcopy(parameter)
    assert type(copied) is nn.Parameter
    assert copied is not parameter
    assert torch.equal(copied, VALUES)


def test_guards_nest() -> None:
    parameter, inner = guarded()
    outer = Fetched(parameter)
    watch(parameter, outer)
    assert guard_of(parameter) is outer
    unwatch(parameter)
    assert guard_of(parameter) is inner
    unwatch(parameter)
    assert guard_of(parameter) is None
    assert type(parameter) is nn.Parameter


def test_a_class_of_the_user_comes_back() -> None:
    class Marked(nn.Parameter):
        pass

    parameter = Marked(VALUES.clone())
    watch(parameter, Fetched(parameter))
    assert isinstance(parameter, nn.Parameter)
    unwatch(parameter)
    assert type(parameter) is Marked


def test_a_tensor_of_another_stage_has_no_plausible_values() -> None:
    parameter, buffer = nn.Parameter(VALUES.clone()), torch.arange(3)
    for tensor in (parameter, buffer):
        stride = tuple(tensor.stride())
        home = HomeStages(name="w", holders=frozenset({1}), stage=0, stride=stride, sight=HookAccess())
        with torch.no_grad():
            send_away(tensor, home)
        with pytest.raises(UnsupportedError, match="`mul` needs the values of `w`, which are on stage 1 and not"):
            _ = tensor * 2
        with torch._C.DisableTorchFunctionSubclass():
            assert tensor.isnan().all() if tensor.is_floating_point() else not tensor.any()
    assert repr(parameter) == "Parameter(w: [2, 3] on stage [1])"
    with torch.no_grad():
        bring_back(parameter, VALUES.clone())
    assert torch.equal(parameter, VALUES)
    assert type(parameter) is nn.Parameter
