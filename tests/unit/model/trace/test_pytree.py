"""Leaves are those of PyTorch's pytree, by whichever way they are found."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.pytree import leaves_of

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Unknown:
    value: int = 1


class MyTuple(tuple):
    """Nothing that pytree would open."""


X, WEIGHT = torch.ones(2), torch.nn.Parameter(torch.ones(2))
TREES = [
    X,
    None,
    (),
    ((X, WEIGHT, 1, None), {}),
    (([X, None], (1, 2.0, "a")), {"dim": [WEIGHT], "other": {"x": (X,)}}),
    (Pair(X, [WEIGHT]), {"pair": Pair(1, 2)}),
    [OrderedDict(a=X, b=[1]), deque([X, (2, 3)])],
    (Unknown(), MyTuple([1, 2]), {1, 2}, torch.float32, torch.Size([2, 3]), slice(1, 2)),
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_leaves_are_those_of_pytree_in_its_order(tree):
    expected = pytree.tree_leaves(tree)
    found = leaves_of(tree)
    assert len(found) == len(expected)
    assert all(leaf is other for leaf, other in zip(found, expected, strict=True))
