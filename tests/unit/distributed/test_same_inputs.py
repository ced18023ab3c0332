"""Digests of inputs: equal for equal inputs, and cheap for large ones."""

import dataclasses
import weakref
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn

from smp_strategy.distributed.agreement.same_inputs import digest_of, refused


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str = "a"


class Graph:
    def __init__(self, x):
        self._store, self._parent = {"x": x}, weakref.ref(self)

    def __call__(self):
        return self._store


class Image(torch.Tensor):
    """As libraries of images have them."""


def of(x):
    return [x, {"x": x}, UserDict(x=x), (1, [x]), Sample(x), Graph(x), x.as_subclass(Image), nn.Parameter(x), x.numpy()]


@pytest.mark.parametrize("number", range(len(of(torch.ones(1)))))
def test_values_are_found_in_what_holds_them(number):
    one, same, other, longer = (of(x)[number] for x in (torch.ones(3), torch.ones(3), torch.zeros(3), torch.ones(4)))
    assert digest_of(one) == digest_of(same)
    assert digest_of(one).values != digest_of(other).values
    assert digest_of(one).shapes == digest_of(other).shapes
    assert digest_of(one).shapes != digest_of(longer).shapes
    assert 0 <= digest_of(one).number < 1 << 63


@pytest.mark.parametrize(
    "tree",
    [
        torch.zeros(0, 3),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3, 2).t(),
        torch.ones(3, 2)[:1, 1],  # one element, so contiguous, with a stride of 2
        np.array(["a"]),
        nn.Linear(2, 2),
        iter([1]),
        None,
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_any_input_has_a_digest(tree):
    assert digest_of(tree) == digest_of(tree)


def test_numbers_are_compared_and_texts_only_if_asked_for():
    assert digest_of({"scale": 1.0}) != digest_of({"scale": 2.0})
    assert digest_of({"name": "a"}) == digest_of({"name": "b"})
    assert digest_of({"name": "a"}, texts=True) != digest_of({"name": "b"}, texts=True)


def test_of_a_large_tensor_some_elements_are_compared_unless_all_are_asked_for():
    large, other = torch.zeros(1 << 20), torch.zeros(1 << 20)
    other[1] = 1.0
    assert digest_of(large) == digest_of(other)
    assert digest_of(large, most=None) != digest_of(other, most=None)
    assert digest_of(large) != digest_of(torch.rand(1 << 20))


def test_an_object_that_holds_itself_has_a_digest():
    circle = Sample(torch.ones(2))
    circle.self = circle
    assert digest_of(circle) == digest_of(circle)


def test_the_error_names_the_ranks_and_what_differs():
    error = str(refused("a step (train)", (3, 1), has_other_shapes=True))
    assert "Ranks 1 and 3 are in a step (train) with different inputs (tensors of other shapes or dtypes)" in error
