"""Results of microbatches become what one process would have returned."""

import collections
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from smp_strategy.engine import join_results as joining
from smp_strategy.engine.join_results import NotJoined, by_leaf, merge, refuse_not_joined
from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.microbatch import split


@dataclass
class Found:
    total: Any
    names: Any = ()


def test_scalars_are_averaged_by_samples():
    merged = merge([torch.tensor(1.0), torch.tensor(4.0)], (2, 1))
    assert merged.item() == pytest.approx(2.0)
    assert merge([1.0, 4.0], (2, 1)) == pytest.approx(2.0)
    assert merge([np.float64(1), np.float64(4)], (2, 1)) == pytest.approx(2.0)


def test_a_mean_over_the_batch_is_the_merge_of_the_means():
    x = torch.randn(7, 3)
    parts, sizes = split(x, 3)
    torch.testing.assert_close(merge([part.mean() for part in parts], sizes), x.mean())


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_counts_add_up_whether_or_not_they_are_equal(right, num_microbatches):
    parts, sizes = split(torch.tensor(right), num_microbatches)
    found = merge([{"right": part.sum(), "n": len(part), "np": np.sum(part.numpy())} for part in parts], sizes)
    assert (int(found["right"]), found["n"], found["np"]) == (sum(right), len(right), sum(right))
    assert found["right"].dtype == torch.int64


@pytest.mark.parametrize(
    ("outputs", "sizes", "expected"),
    [
        ([None, None], (1, 1), None),
        (["a", "a"], (1, 1), "a"),
        (["a", "b"], (1, 1), ["a", "b"]),
        ([None, "b"], (1, 1), [None, "b"]),
        ([1, 3.0], (1, 1), 2.0),
        ([True, True], (1, 1), True),
        ([["a"], ["b", "c"]], (1, 2), ["a", "b", "c"]),
        ([("a",), ("b", "c")], (1, 2), ("a", "b", "c")),
        ([["a", "b"], ["a", "b"]], (2, 2), ["a", "b", "a", "b"]),
        ([[1], [2, 3]], (1, 2), [1, 2, 3]),
        ([("a", 1), ("a", 2)], (1, 1), ("a", 3)),
        ([(1, 2), (3, 4)], (2, 2), (4, 6)),
        ([{"a": 1}, {"b": 1}], (1, 1), {"a": 1, "b": 1}),
        ([{"a": 1.0, "b": 2.0}, {"a": 4.0}], (2, 1), {"a": 2.0, "b": 2.0}),
        ([Found(1, ["a"]), Found(2, ["b"])], (1, 1), Found(3, ["a", "b"])),
        ([collections.Counter("ab"), collections.Counter("b")], (2, 1), collections.Counter("abb")),
        ([[{"n": 1}], [{"n": 2}, {"n": 3}]], (1, 2), [{"n": 1}, {"n": 2}, {"n": 3}]),
        ([(None, None), (None, None)], (2, 2), (None, None)),
    ],
)
def test_results_are_joined_by_their_kind(outputs, sizes, expected):
    assert merge(outputs, sizes) == expected


def test_what_has_an_entry_per_sample_is_put_together():
    merged = merge([{"t": torch.ones(2, 3), "a": np.zeros(2)}, {"t": torch.zeros(1, 3), "a": np.ones(1)}], (2, 1))
    assert merged["t"].shape == (3, 3)
    assert merged["a"].tolist() == [0, 0, 1]
    boxes = merge([[torch.ones(2, 4), torch.ones(5, 4)], [torch.ones(3, 4)]], (2, 1))
    assert [len(each) for each in boxes] == [2, 5, 3]
    pair = merge([(torch.ones(2, 3), torch.ones(2, 5)), (torch.ones(2, 3), torch.ones(2, 5))], (2, 2))
    assert [list(each.shape) for each in pair] == [[4, 3], [4, 5]]


def test_packed_and_nested_sequences_are_put_together():
    sequences = [torch.randn(length, 2) for length in (2, 4, 1)]
    parts = [pack_sequence(sequences[:2], enforce_sorted=False), pack_sequence(sequences[2:], enforce_sorted=False)]
    assert all(map(torch.equal, unpack_sequence(merge(parts, (2, 1))), sequences))
    parts = [torch.nested.as_nested_tensor(part, layout=torch.jagged) for part in (sequences[:2], sequences[2:])]
    assert all(map(torch.equal, merge(parts, (2, 1)).unbind(), sequences))


def test_a_number_that_the_step_was_given_is_no_count():
    index = joining.given(3)
    merged = merge([{"index": index, "next": index + 1}] * 2, (1, 1))
    assert merged == {"index": 3, "next": 8}
    assert type(merged["index"]) is int
    assert type(pickle.loads(pickle.dumps(index))) is int
    assert joining.given(True) is True


def test_a_constant_stays_what_it_is():
    assert torch.equal(merge([torch.ones(5), torch.ones(5)], (2, 1)), torch.ones(5))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.ones(5), torch.zeros(5)], "no dim of it stands for the samples"),
        ([torch.ones(5).int(), torch.ones(5).int()], "no dim of it stands for the samples"),  # counts by class
        ([torch.ones(3, 4), torch.ones(2, 4)], r"their shapes differ \(\[3, 4\], \[2, 4\]\)"),
        ([torch.ones(2, 4), torch.ones(1, 5)], r"their shapes differ \(\[2, 4\], \[1, 5\]\)"),
        ([np.ones((2, 4)), np.ones((1, 5))], r"their shapes differ \(\[2, 4\], \[1, 5\]\)"),
        ([True, False], "these truth values differ"),
        ([torch.tensor(True), torch.tensor(False)], "these truth values differ"),
    ],
)
def test_what_can_be_joined_in_several_ways_is_refused_when_it_is_used(outputs, message):
    merged = merge([{"loss": 1.0, "x": output} for output in outputs], (2, 1))
    assert isinstance(merged["x"], NotJoined)
    uses = (
        *(lambda x: x + 1, lambda x: 1 - x, lambda x: torch.ones(5) + x, torch.sum, float, len, list, bool, np.asarray),
        *(lambda x: x.shape, lambda x: x[0], lambda x: x == 1, pickle.dumps),
    )
    for use in uses:
        with pytest.raises(UnsupportedError, match=rf"under \['x'\] .*{message}.*`microbatches=1`"):
            use(merged["x"])
    with pytest.raises(UnsupportedError, match=message):
        refuse_not_joined(merged)
    assert refuse_not_joined({"loss": 1.0}) == {"loss": 1.0}


def test_shapes_are_those_of_the_whole_batch():
    merged = merge([torch.Size((2, 8)), torch.Size((1, 8))], (2, 1))
    assert merged == torch.Size((3, 8))
    assert isinstance(merged, torch.Size)
    assert merge([torch.Size((8, 8)), torch.Size((8, 8))], (2, 1)) == torch.Size((8, 8))
    with pytest.raises(UnsupportedError, match="they differ"):
        len(merge([torch.Size((2, 8)), torch.Size((1, 9))], (2, 1)))


def test_distributions_and_namespaces_are_merged_by_their_attributes():
    normals = [torch.distributions.Normal(torch.full((size, 2), float(size)), torch.ones(())) for size in (1, 3)]
    merged = merge([torch.distributions.Independent(each, 1) for each in normals], (1, 3))
    assert (merged.batch_shape, merged.event_shape, merged.reinterpreted_batch_ndims) == ((4,), (2,), 1)
    assert merged.base_dist.loc[:, 0].tolist() == [1, 3, 3, 3]
    spaces = [SimpleNamespace(x=torch.ones(size), size=size, name="a") for size in (1, 3)]
    found = merge(spaces, (1, 3))
    assert (found.name, len(found.x)) == ("a", 4)
    with pytest.raises(UnsupportedError, match="size"):
        int(found.size)


def test_results_are_joined_leaf_by_leaf_as_far_as_they_are_built_alike():
    assert by_leaf([{"a": 1, "b": (2, 3)}, {"a": 4, "b": (5, 6)}], list) == {"a": [1, 4], "b": ([2, 5], [3, 6])}
    assert by_leaf([{"a": [1], "b": 2}, {"a": [1, 2], "b": 3}], list) == {"a": [[1], [1, 2]], "b": [2, 3]}
    assert by_leaf([(1, 2), (3,)], list) == [(1, 2), (3,)]
