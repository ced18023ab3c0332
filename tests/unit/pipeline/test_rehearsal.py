"""Snapshots that rehearsals compare."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from smp_strategy.pipeline.isolation.rehearsal import frozen


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
