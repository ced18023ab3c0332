from typing import Any

import pytest
import torch

from smp_strategy.tensor_parallel.sharded_tensor.shapes import RULES, Arguments, Split, broadcast, reshaped

HEADS = Split((2, 8, 12), 2, (8, 4), 0)
TOKENS = Split((2, 8, 12), 1, (5, 3), 1)


def cut_after(name: str, split: Split, *args: Any, **kwargs: Any) -> Any:
    """Where the result is cut, and the arguments for the part; `None`: the whole is needed."""
    local = RULES[name](split, Arguments(args, kwargs))
    return local and (local.dim, local.lengths, local.args)


@pytest.mark.parametrize(
    ("split", "size", "found"),
    [
        (HEADS, (2, 8, 3, 4), (2, (2, 1))),  # heads of four columns
        (HEADS, (2, 8, 2, 6), None),  # a head of six columns would be torn
        (HEADS, (16, 12), (1, (8, 4))),
        (HEADS, (2, -1, 12), (2, (8, 4))),
        (HEADS, (192,), None),
        (TOKENS, (2, 96), (1, (60, 36))),
        (TOKENS, (16, 12), None),  # parts of different samples would stand in turns
        (TOKENS, (2, 8, 1, 12), (1, (5, 3))),
        (TOKENS, (2, 1, 8, 12), (2, (5, 3))),
        (Split((1, 8, 12), 1, (5, 3), 0), (8, 12), (0, (5, 3))),
        (Split((0, 8), 1, (5, 3), 0), (8, 0), None),
    ],
)
def test_a_reshape_keeps_parts_where_their_elements_stay_together(split, size, found):
    assert reshaped(split, size) == found


def test_a_reshape_of_a_part_has_its_own_length():
    assert cut_after("view", HEADS, 2, 8, 3, 4) == (2, (2, 1), ((2, 8, 2, 4),))
    assert cut_after("reshape", TOKENS, (2, -1)) == (1, (60, 36), ((2, 36),))
    assert cut_after("view", HEADS, torch.int32) is None


@pytest.mark.parametrize(
    ("name", "args", "dim"),
    [
        ("transpose", (1, 2), 2),
        ("transpose", (0, -1), 1),
        ("permute", (1, 2, 0), 0),
        ("permute", ((2, 1, 0),), 1),
        ("unsqueeze", (0,), 2),
        ("unsqueeze", (-1,), 1),
        ("sum", (2,), 1),
        ("sum", ((0, 2),), 0),
        ("sum", ((0, 2), True), 1),
        ("sum", (-2,), None),
        ("sum", (), None),
        ("max", (0,), 0),
        ("max", (torch.ones(1),), None),
        ("softmax", (-1,), 1),
        ("softmax", (1,), None),
        ("softmax", (None,), None),
        ("flip", (0, 2), 1),
        ("flip", (0, 1), None),
        ("layer_norm", ((12,),), 1),
        ("layer_norm", ((8, 12),), None),
        ("select", (0, 1), 0),
        ("narrow", (1, 0, 3), None),
        ("split", (4, 2), 1),
        ("split", (4, 1), None),
        ("embedding", (torch.ones(3, 4),), 1),
        ("embedding", (torch.ones(3, 4), None, 1.0), None),
    ],
)
def test_the_dim_that_is_cut_is_followed(name, args, dim):
    found = cut_after(name, TOKENS, *args)
    assert (found and found[0]) == dim


@pytest.mark.parametrize(
    ("index", "dim"),
    [
        (0, 0),
        ((slice(None), slice(None), 3), 1),
        ((..., 3), 1),
        ((None, ...), 2),
        ((0, slice(None), None), 0),
        ((slice(None), slice(0, 8)), 1),
        ((slice(None), slice(0, 7)), None),
        ((slice(None), slice(None, None, 2)), None),
        ((slice(None), 2), None),
        ((torch.tensor([0, 1]),), 1),
        ((torch.tensor([[0, 1]]),), 2),
        ((torch.tensor([True, False]),), 1),
        ((torch.ones(2, 8, dtype=torch.bool),), None),
        ((slice(None), slice(None), torch.tensor([1, 2])), 1),
        ((torch.tensor([0]), slice(None), torch.tensor([1])), None),
        ((0, slice(None), torch.tensor([1])), None),
        ([0, 1], None),
        ((True,), None),
    ],
)
def test_an_index_is_local_if_it_takes_all_of_the_dim_that_is_cut(index, dim):
    found = cut_after("__getitem__", TOKENS, index)
    assert (found and found[0]) == dim


def test_dims_of_one_element_are_named_since_a_part_may_have_one_where_the_whole_has_more():
    split = Split((1, 2, 1, 4), 1, (1, 1), 0)
    assert cut_after("squeeze", split) == (0, (1, 1), ((0, 2),))
    assert cut_after("squeeze", Split((3, 1), 1, (1, 0), 0)) is None


def test_expanding_keeps_the_length_of_the_part():
    split = Split((8, 1), 0, (5, 3), 1)
    assert cut_after("expand", split, 4, 8, 6) == (1, (5, 3), ((4, 3, 6),))
    assert cut_after("expand", split, -1, 6) == (0, (5, 3), ((3, 6),))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([(2, 3), (3,)], (2, 3)),
        ([(2, 1), (4, 1, 3), ()], (4, 2, 3)),
        ([(0, 1), (1, 5)], (0, 5)),
        ([(2, 3), (2,)], None),
    ],
)
def test_sizes_are_broadcast_as_in_torch(sizes, found):
    assert broadcast(sizes) == found
    if found is not None:
        assert torch.broadcast_shapes(*sizes) == found
