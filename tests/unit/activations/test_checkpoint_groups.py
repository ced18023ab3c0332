"""Calls that are computed again together."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.activations.policy import KEEP, ActivationPolicy
from smp_strategy.activations.unit_wrapper import UnitWrapper
from tests.unit.activations.calls import ALL, CHEAP, WIDTH, Mlp, gradients, treated


class Noted(Mlp):
    def __init__(self, number: int, notes: list[int]) -> None:
        super().__init__()
        self.note = lambda: notes.append(number)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return torch.sin(super().forward(torch.dropout(x, 0.3, True)))


def chain(policy: ActivationPolicy, between: str = "nothing") -> tuple[list[int], list[object], list[bool]]:
    """Runs of four units in a row, their gradients, and which of their inputs live until backward."""
    torch.manual_seed(0)
    notes: list[int] = []
    units = nn.ModuleList(Noted(number, notes) for number in range(4))
    activations = UnitWrapper()
    x = torch.randn(3, WIDTH, requires_grad=True) * 1
    inputs: list[weakref.ref[Tensor]] = []
    for number, unit in enumerate(units):
        name = f"blocks.{number}" if between != "lists" or number < 2 else f"others.{number}"
        call = treated(unit, policy, activations=activations, name=name)
        inputs.append(weakref.ref(x.untyped_storage()))
        if between == "code" and number == 2:
            x = x * 1.5
            inputs[-1] = weakref.ref(x.untyped_storage())
        if between == "change" and number == 2:
            x.mul_(1.5)
        x = call(x)
    gc.disable()
    try:
        del inputs[4:]
        kept = [each() is not None for each in inputs]
        notes.clear()
        x.sum().backward()
    finally:
        gc.enable()
    return notes, gradients(units), kept


@pytest.mark.parametrize("between", ["nothing", "code", "lists", "change"])
@pytest.mark.parametrize("size", [1, 2, 3, None])
@pytest.mark.parametrize("policy", [ALL, CHEAP], ids=["all", "cheap"])
def test_groups_have_the_numbers_of_single_calls(policy: ActivationPolicy, size: int | None, between: str) -> None:
    _, expected, _ = chain(KEEP, between)
    _, found, _ = chain(replace(policy, group=size), between)
    assert found == expected


@pytest.mark.parametrize(
    ("size", "between", "order"),
    [
        (1, "nothing", [3, 2, 1, 0]),
        (2, "nothing", [2, 3, 0, 1]),
        (3, "nothing", [3, 0, 1, 2]),
        (None, "nothing", [0, 1, 2, 3]),
        (None, "code", [2, 3, 0, 1]),
        (None, "lists", [2, 3, 0, 1]),
        (None, "change", [2, 3, 0, 1]),
    ],
)
def test_each_call_is_run_once_more_after_those_before_it_in_its_group(
    size: int | None, between: str, order: list[int]
) -> None:
    runs, _, _ = chain(replace(ALL, group=size), between)
    assert runs == order


@pytest.mark.parametrize(
    ("size", "kept"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), (None, [1, 0, 0, 0])]
)
def test_only_the_first_of_a_group_keeps_its_input(size: int | None, kept: list[int]) -> None:
    _, _, found = chain(replace(ALL, group=size))
    assert found == [bool(each) for each in kept]


def test_calls_of_other_microbatches_do_not_follow() -> None:
    activations, x = UnitWrapper(), torch.randn(3, WIDTH)
    calls = []
    for token in (0, 1):
        unit = Mlp()
        calls.append((unit, token))
    first = treated(calls[0][0], replace(ALL, group=None), activations=activations)(x)
    joined = activations._groups.join("blocks.1", 1, [first], None)
    assert joined.earlier is None
    assert activations._groups.join("blocks.1", 0, [first], None).earlier is not None


def test_nothing_of_a_group_outlives_its_graph() -> None:
    activations = UnitWrapper()
    unit = Mlp()
    y = treated(unit, replace(ALL, group=None), activations=activations)(torch.randn(3, WIDTH, requires_grad=True))
    result = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert result() is None
        assert activations._groups.join("blocks.1", 0, [], None).earlier is None
    finally:
        gc.enable()
