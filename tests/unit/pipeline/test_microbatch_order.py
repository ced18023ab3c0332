"""Where microbatches may wait for those before them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from smp_strategy.model.trace.events import Event, Value
from smp_strategy.pipeline.microbatch_order import Gate, gate_position
from smp_strategy.pipeline.rehearsal import frozen
from smp_strategy.pipeline.routing import Router


def placed(num_stages, *events):
    """``events``, as (kind, name, inputs, outputs) by numbers; units are called by their stage."""
    router = Router({str(stage): stage for stage in range(num_stages)}, num_stages)
    found = []
    for kind, name, inputs, outputs in events:
        given, made = (tuple(Value(number, 4, True) for number in numbers) for numbers in (inputs, outputs))
        event = Event(kind, name, given, made)
        found.append((event, router.place(event)))
    return found


CHAIN = (("unit", "0", (), (0,)), ("unit", "1", (0,), (1,)))
LOSS = ("op", "loss", (1,), (2,))
READ = ("read", "item", (2,), ())


@pytest.mark.parametrize(
    ("events", "position"),
    [
        pytest.param((*CHAIN, LOSS, READ), 2, id="a read of the loss"),
        pytest.param((*CHAIN, LOSS, READ, ("op", "mul", (2,), (3,)), ("read", "item", (3,), ())), 2, id="two of them"),
        pytest.param(
            (*CHAIN, LOSS, READ, ("op", "norm", (0,), (3,)), ("read", "item", (3,), ())),
            4,
            id="stage 0 would wait for what stage 1 does with a value that stage 0 sends later",
        ),
        pytest.param(
            (*CHAIN, LOSS, READ, ("op", "norm", (0,), (3,)), ("op", "add", (3, 1), (4,)), ("op", "add", (4, 2), (5,))),
            6,
            id="an operation needs a value of another stage",
        ),
    ],
)
def test_the_gate_is_after_the_last_value_that_another_stage_computes_with(events, position):
    assert gate_position(placed(2, *events)) == position


def test_nothing_moves_so_there_is_no_gate():
    assert gate_position(placed(2, ("unit", "0", (), (0,)), ("op", "loss", (0,), (1,)))) is None


def test_a_gate_is_passed_once():
    waited = []
    gate = Gate(2, lambda: waited.append(True))
    for number in (1, 2, 3, 4):
        gate.reach(number)
    assert len(waited) == 1


class Own:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "change",
    [
        lambda place: place.update(number=2),
        lambda place: place["list"].append(1),
        lambda place: place["dict"].update(inner={"sum": 2.0}),
        lambda place: place["array"].__setitem__(0, 1.0),
        lambda place: place["tensor"].add_(1),
        lambda place: place["object"].__setattr__("value", 2),
        lambda place: place["meters"]["loss"].__setattr__("value", 2),
        lambda place: place["set"].add("b"),
    ],
)
def test_what_changes_in_a_place_is_seen(change):
    place = {
        "number": 1,
        "list": [0.5],
        "dict": {"inner": {"sum": 1.0}},
        "array": np.zeros(2),
        "tensor": torch.zeros(2, dtype=torch.bfloat16),
        "object": Own(1),
        "meters": {"loss": SimpleNamespace(value=1)},
        "set": {"a"},
    }
    before = {name: frozen(value) for name, value in place.items()}
    assert before == {name: frozen(value) for name, value in place.items()}
    change(place)
    assert len([name for name, value in place.items() if before[name] != frozen(value)]) == 1


def test_objects_of_libraries_are_all_the_same():
    assert frozen(nn.Linear(1, 1)) == frozen(nn.Linear(1, 1))
