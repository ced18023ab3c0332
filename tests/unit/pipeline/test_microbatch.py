"""Cutting batches and merging results."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from smp_strategy.engine.join_results import merge
from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.microbatch import sizes_of, split


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Any
    note: str = ""


class Encoding(collections.UserDict):
    """Like Hugging Face's BatchEncoding: a mapping with attributes of its own."""

    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


def trees(num_samples: int) -> st.SearchStrategy:
    tensors = st.integers(0, 2).map(lambda width: torch.arange(num_samples * (width + 1)).reshape(num_samples, -1))
    texts = st.just([f"text {i}" for i in range(num_samples)])
    return st.recursive(
        tensors | texts,
        lambda children: (
            st.dictionaries(st.sampled_from("abc"), children, min_size=1, max_size=3)
            | st.tuples(children, children)
            | st.builds(Pair, children, children)
            | st.builds(Record, children)
            | st.dictionaries(st.sampled_from("abc"), children, min_size=1, max_size=2).map(Encoding)
        ),
        max_leaves=5,
    )


def plain(tree: Any) -> Any:
    """With lists for tensors, so that == compares."""
    if isinstance(tree, Tensor):
        return ("tensor", tree.tolist())
    if isinstance(tree, collections.abc.Mapping):
        return (type(tree), {key: plain(value) for key, value in tree.items()})
    if isinstance(tree, (tuple, list)):
        return (type(tree), [plain(item) for item in tree])
    return (type(tree), plain(tree.x)) if isinstance(tree, Record) else tree


@given(st.integers(2, 9).flatmap(lambda num: st.tuples(trees(num), st.just(num))), st.integers(1, 10))
def test_a_batch_is_the_merge_of_its_microbatches(case, num_microbatches):
    batch, num_samples = case
    before = plain(batch)
    parts, sizes = split(batch, num_microbatches)
    assert sum(sizes) == num_samples
    assert len(parts) == min(num_microbatches, num_samples)
    assert plain(merge(parts, sizes)) == before == plain(batch)


TEXTS = [f"text {number}" for number in range(4)]


@pytest.mark.parametrize("result", [Pair(TEXTS, TEXTS), Record(TEXTS, "a note"), {"x": Pair(TEXTS, TEXTS)}])
def test_a_tuple_of_results_with_fields_is_no_list_of_samples(result):
    batch = (result, result)
    parts, sizes = split(batch, 2)
    assert plain(merge(parts, sizes)) == plain(batch)


def test_a_list_of_objects_with_fields_has_one_for_each_sample():
    outputs = [[Pair(torch.ones(2), torch.ones(2))] * 2, [Pair(torch.zeros(2), torch.zeros(2))] * 2]
    assert plain(merge(outputs, (2, 2))) == plain(outputs[0] + outputs[1])


@given(st.integers(1, 1000), st.integers(1, 100))
def test_sizes_add_up_and_differ_by_one_at_most(num_samples, num_microbatches):
    sizes = sizes_of(num_samples, num_microbatches)
    assert sum(sizes) == num_samples
    assert len(sizes) == min(num_samples, num_microbatches)
    assert sorted(sizes, reverse=True) == list(sizes)
    assert max(sizes) - min(sizes) <= 1


def test_an_uneven_batch_puts_the_larger_microbatches_first():
    parts, sizes = split(torch.arange(10), 4)
    assert sizes == (3, 3, 2, 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_a_small_batch_makes_fewer_microbatches():
    parts, sizes = split({"x": torch.arange(3)}, 8)
    assert sizes == (1, 1, 1)
    assert [part["x"].tolist() for part in parts] == [[0], [1], [2]]


def test_what_is_not_per_sample_is_given_to_every_microbatch():
    batch = {"x": torch.zeros(4), "scale": torch.tensor(2.0), "name": "run", "three": ["a", "b", "c"], "none": None}
    parts, _ = split(batch, 2)
    for part in parts:
        assert part["scale"] is batch["scale"]
        assert (part["name"], part["three"], part["none"]) == ("run", ["a", "b", "c"], None)


def test_lists_of_strings_and_numbers_per_sample_are_cut():
    parts, _ = split({"x": torch.zeros(4), "texts": ["a", "b", "c", "d"], "ids": [1, 2, 3, 4]}, 2)
    assert [part["texts"] for part in parts] == [["a", "b"], ["c", "d"]]
    assert [part["ids"] for part in parts] == [[1, 2], [3, 4]]


def test_a_batch_of_strings_alone_is_cut():
    assert split(["a", "b", "c"], 2) == ([["a", "b"], ["c"]], (2, 1))


def test_lists_of_tensors_are_containers():
    parts, sizes = split([torch.zeros(4, 2), torch.ones(4)], 2)
    assert sizes == (2, 2)
    assert [[tuple(item.shape) for item in part] for part in parts] == [[(2, 2), (2,)]] * 2


@pytest.mark.parametrize("boxes", [1, 3])  # as many as samples, by chance, too
def test_a_list_of_dicts_beside_tensors_is_per_sample(boxes):
    images, targets = torch.rand(3, 2), [{"boxes": torch.rand(boxes + number % 2, 4)} for number in range(3)]
    (first, second), sizes = split({"images": images, "targets": targets}, 2)
    assert sizes == (2, 1)
    assert first["targets"] == targets[:2]
    assert second["targets"] == targets[2:]


def test_a_list_of_dicts_alone_is_a_container():
    first, second = split([{"x": torch.arange(4)}, {"x": torch.arange(4)}], 2)[0]
    assert [item["x"].tolist() for item in first] == [[0, 1], [0, 1]]
    assert [item["x"].tolist() for item in second] == [[2, 3], [2, 3]]


def test_a_mapping_keeps_its_type_and_its_other_attributes():
    batch = Encoding({"x": torch.arange(4)}, encodings="kept")
    parts, _ = split(batch, 2)
    assert [type(part) for part in parts] == [Encoding, Encoding]
    assert [part.encodings for part in parts] == ["kept", "kept"]
    assert batch["x"].tolist() == [0, 1, 2, 3]


class Shallow(collections.abc.MutableMapping):
    """A mapping whose copy shares its memory: cutting it in place would cut the user's batch."""

    def __init__(self, data: dict) -> None:
        self.data = data

    def __getitem__(self, key):
        return self.data[key]

    def __setitem__(self, key, value):
        self.data[key] = value

    def __delitem__(self, key):
        del self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def test_the_users_batch_is_never_changed():
    batch = Shallow({"x": torch.arange(4), "y": torch.arange(4)})
    parts, _ = split(batch, 2)
    assert [part["y"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert batch["x"].tolist() == [0, 1, 2, 3]


class Graphs:
    """Cuts itself."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def smp_slice(self, num_microbatches: int, microbatch: int, axis: int) -> "Graphs":
        assert axis == 0
        return Graphs(self.items[microbatch::num_microbatches])


def test_what_a_microbatch_changes_in_place_does_not_invalidate_what_autograd_keeps_of_another():
    weight = torch.ones(2, requires_grad=True)
    batch = torch.arange(8.0).reshape(4, 2)
    (first, second), _ = split(batch, 2)
    result = (first * weight).sum()
    second.mul_(2)
    result.backward()
    assert weight.grad.tolist() == [2.0, 4.0]
    assert batch[2:].tolist() == [[8.0, 10.0], [12.0, 14.0]]  # in place, as in one process


def test_an_object_may_cut_itself():
    parts, _ = split({"x": torch.zeros(4), "graphs": Graphs([0, 1, 2, 3])}, 2)
    assert [part["graphs"].items for part in parts] == [[0, 2], [1, 3]]


def test_an_object_that_cuts_itself_can_be_the_whole_batch():
    parts, sizes = split(Graphs([0, 1, 2, 3]), 2)
    assert [part.items for part in parts] == [[0, 2], [1, 3]]
    assert sizes == (1, 1)


class Nodes:
    """A graph of several samples, with tensors of nodes only."""

    def __init__(self, **tensors):
        vars(self).update(tensors)


@pytest.mark.parametrize("index", [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
def test_an_object_that_tells_the_sample_of_each_entry_is_refused(index):
    graph = Nodes(x=torch.zeros(6, 3), batch=torch.tensor(index))
    with pytest.raises(UnsupportedError, match=r"`batch\[0\]` .*Nodes.*smp_slice"):
        split((graph, torch.zeros(2, 1)), 2)


@pytest.mark.parametrize("index", [[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2], [1, 1, 1, 2, 2, 2]])
def test_an_object_with_other_tensors_goes_to_every_microbatch(index):
    graph = Nodes(x=torch.zeros(6, 3), kinds=torch.tensor(index))
    parts, _ = split((graph, torch.zeros(2, 1)), 2)
    assert [part[0] for part in parts] == [graph, graph]


def test_tensors_that_disagree_on_the_number_of_samples_are_refused():
    with pytest.raises(
        UnsupportedError, match=r"4 samples \(`batch\['x'\]`\), but `batch\['weights'\]` .*\[10\].*`microbatches=1`"
    ):
        split({"x": torch.zeros(4), "weights": torch.zeros(10)}, 2)


def test_one_microbatch_is_the_batch_itself_whatever_it_holds():
    batch = {"x": torch.zeros(4), "weights": torch.zeros(10)}
    parts, sizes = split(batch, 1)
    assert parts[0] is batch
    assert len(sizes) == 1


@pytest.mark.parametrize("batch", [None, 3, "text", {}, torch.tensor(1.0), {"a": None}])
def test_a_batch_without_samples_is_one_microbatch(batch):
    parts, sizes = split(batch, 4)
    assert len(parts) == 1
    assert parts[0] is batch
    assert sizes == (1,)


def test_an_empty_batch_is_one_empty_microbatch():
    parts, sizes = split(torch.zeros(0, 3), 4)
    assert [tuple(part.shape) for part in parts] == [(0, 3)]
    assert sizes == (0,)
