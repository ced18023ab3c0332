"""Leaves are those of PyTorch's pytree, by whichever way they are found."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.pytree import items_of, leaves_of, nodes

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


def test_nodes_come_from_the_outside_in_with_their_paths():
    tree = {"a": [1, (2, "ab")], 3: OrderedDict(x=None)}
    assert list(nodes(tree)) == [
        ((), tree),
        (("a",), tree["a"]),
        (("a", 0), 1),
        (("a", 1), (2, "ab")),
        (("a", 1, 0), 2),
        (("a", 1, 1), "ab"),
        ((3,), tree[3]),
        ((3, "x"), None),
    ]


def test_nodes_end_at_the_last_level_and_at_what_is_not_opened():
    tree = [[[1]], {"a": [2]}]
    assert [path for path, _ in nodes(tree, levels=2)] == [(), (0,), (0, 0), (1,), (1, "a")]
    found = nodes(tree, lambda node: items_of(node) if isinstance(node, list) else ())
    assert [path for path, _ in found] == [(), (0,), (0, 0), (0, 0, 0), (1,)]


def test_a_nest_may_hold_itself_where_each_node_comes_once():
    inner = [1]
    tree = [inner, inner]
    tree.append(tree)
    once = {}
    assert [path for path, _ in nodes(tree, once=once)] == [(), (0,), (0, 0)]
    assert list(nodes(inner, once=once)) == []
    with pytest.raises(RecursionError):
        list(nodes(tree))
