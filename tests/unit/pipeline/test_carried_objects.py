"""Calls of units on two stages, once an object comes to a unit again."""

from typing import Any

import pytest
import torch

from smp_strategy.distributed.agreement.same_inputs import digest_of
from smp_strategy.distributed.agreement.topics import UNIT_ARGUMENTS
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.pipeline.isolation.carried_objects import CarriedObjects


class Cache:
    """An object with a state."""


def noted(cache: Any, *lengths: int) -> list[str]:
    """What a stage notes if the mask has these lengths in one call after the other."""
    carried = CarriedObjects()
    for length in lengths:
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        carried.note(0, Callee("h.0", lambda: None), (torch.zeros(2, 1, 4),), {"mask": mask, "cache": cache})
    return carried._given[0].calls


def test_stages_that_ask_a_cache_for_its_length_are_refused():
    with pytest.raises(UnsupportedError, match=r"\[2, 1, 1, 1\] with sum 2 .*length of a cache.*`use_cache=False`"):
        raise UNIT_ARGUMENTS.explain({0: {0: noted(Cache(), 3, 1)}, 1: {0: noted(Cache(), 3, 4)}})
    assert noted(Cache(), 3, 4) == noted(Cache(), 3, 4)


def test_calls_are_noted_once_an_object_comes_again():
    assert len(noted(Cache(), 3, 4, 5)) == 2
    assert noted(None, 3, 4, 5) == []


def test_each_unit_and_microbatch_has_objects_of_its_own():
    carried, cache = CarriedObjects(), Cache()
    for microbatch in range(2):
        for unit in ("h.0", "h.1"):
            carried.note(microbatch, Callee(unit, lambda: None), (), {"cache": cache})
    assert not any(given.is_carried for given in carried._given.values())
    carried.note(1, Callee("h.0", lambda: None), (), {"cache": cache})
    assert [given.is_carried for given in carried._given.values()] == [False, True]


def test_plain_tensors_of_calls_are_compared_once_unless_they_are_overwritten():
    carried, mask, hidden = CarriedObjects(), torch.ones(4), torch.empty(2)
    for unit in ("h.0", "h.1"):
        carried.note_tensors(unit, [mask, hidden, 3], but=(1,))
    carried.note_tensors("add", [hidden.clone().fill_(2.0)], but=())
    ((first, *values), (second, *_)), losses = carried.take_inputs()
    assert [first, second] == ["a call of `h.0`", "a call of `add`"]
    assert values == list(digest_of([mask]))
    assert not losses
    assert carried.take_inputs() == ([], [])


def test_losses_are_in_the_order_of_microbatches_and_rounded():
    carried = CarriedObjects()
    carried.note_loss(1, torch.tensor(1.23456))
    carried.note_loss(0, torch.tensor(0.98765, dtype=torch.bfloat16))
    _, losses = carried.take_inputs()
    assert losses == [("the computation of the loss", -2, 0.99), ("the computation of the loss", -4, 1.235)]


def test_the_first_steps_and_some_later_ones_are_compared():
    carried, compared = CarriedObjects(), []
    for number in range(1, 129):
        carried.note_tensors("h.0", [torch.ones(2)], but=())
        inputs, _ = carried.take_inputs()
        if inputs:
            compared.append(number)
    assert compared == [*range(1, 9), 64, 128]
