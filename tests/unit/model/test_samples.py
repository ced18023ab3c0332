"""Where the samples of a batch are."""

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import default_collate

from smp_strategy.engine.join_results import merge
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.samples import BatchSource, find_samples, samples_in
from smp_strategy.pipeline.microbatch import split


def ones(*size: int) -> Tensor:
    return torch.ones(size)


def sample(number: int) -> dict[str, Any]:
    """Of which nothing but its number says which it is; sizes differ and coincide."""
    size = 1 + number % 3
    return {"image": torch.full((3, size, 4), float(number)), "boxes": torch.full((size, 4), number), "id": number}


def numbers_of(tree: Any) -> set[int]:
    """Which samples are in a part of a batch."""
    if isinstance(tree, Tensor):
        return {int(value) for value in tree.flatten()}
    if isinstance(tree, dict):
        return set().union(*map(numbers_of, tree.values()))
    return {int(tree)} if isinstance(tree, (int, str)) else set().union(*map(numbers_of, tree))


COLLATED = {
    "samples": lambda samples: samples,
    "tuples of images and targets": lambda samples: tuple(zip(*[(s["image"], s) for s in samples], strict=True)),
    "images alone": lambda samples: [s["image"] for s in samples],
    "boxes beside labels": lambda samples: {
        "boxes": [s["boxes"] for s in samples],
        "label": torch.tensor([s["id"] for s in samples]),
    },
    "default": lambda samples: default_collate([(torch.tensor([s["id"]]), str(s["id"])) for s in samples]),
    "default, nested": lambda samples: default_collate(
        [
            {"x": torch.tensor(float(s["id"])), "meta": {"name": str(s["id"]), "at": (s["id"], str(s["id"]))}}
            for s in samples
        ]
    ),
    "numpy": lambda samples: (np.array([s["id"] for s in samples]).tolist(), np.array([str(s["id"]) for s in samples])),
}


@pytest.mark.parametrize("name", COLLATED)
@given(number=st.integers(2, 9), num_microbatches=st.integers(1, 6))
def test_every_sample_is_in_one_microbatch(name, number, num_microbatches):
    if name == "images alone" and number == 3:
        return  # as many images as channels: three views of three samples
    batch = COLLATED[name]([sample(index) for index in range(number)])
    parts, sizes = split(batch, num_microbatches, BatchSource(number))
    found = [numbers_of(part) for part in parts]
    assert [len(each) for each in found] == list(sizes)
    assert set().union(*found) == set(range(number))


@pytest.mark.parametrize(
    ("batch", "known", "number", "lists"),
    [
        ([ones(4, 8)] * 6, 6, 6, {()}),  # six samples
        ([ones(4, 8)] * 6, 4, 4, set()),  # six views of four samples
        ([ones(4, 8)] * 6, None, 4, set()),
        ([ones(2, 8), ones(2, 8)], 2, 2, set()),  # two views of two samples
        ([ones(2, 8), ones(2, 3)], 2, 2, set()),
        ([ones(4, 8), ones(4)], 2, 4, set()),  # each sample was taken twice
        ([ones(2, 8), ("a", "b")], 2, 2, {(1,)}),
        ((ones(2, 8), None), 2, 2, set()),
        ((ones(2, 8), "task"), 2, 2, set()),
        ((ones(2, 8), ones(1, 8)), 2, 2, set()),  # which broadcasts
        ((ones(2, 8), ones(3, 8)), None, 2, set()),
        ({"x": ones(4, 8), "m": [ones(n, 2) for n in (1, 2, 3, 4)]}, None, 4, {("m",)}),
        ({"m": [ones(4, 2)], "x": ones(1, 8)}, None, 1, {("m",)}),
        ([{"x": ones(4)}, {"x": ones(4)}], None, 4, set()),
        ([{"x": ones(4)}, {"x": ones(2)}], None, 2, {()}),
        ([[1, 2, 3], [4, 5, 6]], 2, 2, {()}),  # tokens
        ([("a", "b", "c"), ("d", "e", "f")], None, 3, {(0,), (1,)}),
        ((("a", "b"), ("c", "d")), 2, 2, {(0,), (1,)}),
        ([(ones(3, 4), 1), (ones(3, 4), 0)], 2, 2, {()}),  # samples with labels
        (((ones(3, 4), ones(3, 5)), ({"at": ones(2)}, {"at": ones(1)})), 2, 2, {(0,), (1,)}),  # images and targets
        ([[ones(3, 4), ones(3, 5)], [{"at": ones(2)}, {"at": ones(1)}]], 2, 2, {(0,), (1,)}),
        ({"x": ones(4), "size": (2, 2)}, 4, 4, set()),
        ({"x": ones(8), "size": (2, 2)}, 2, 8, set()),
        (torch.Size([4, 2]), 4, None, set()),
        ("text", 4, None, set()),
    ],
)
def test_lists_are_cut_between_their_entries_if_these_are_samples(batch, known, number, lists):
    found = find_samples(batch, None if known is None else BatchSource(known))
    assert (found.number, found.lists) == (number, lists)
    assert samples_in(batch, found) == number


def test_the_data_loader_knows_whether_tensors_are_samples_or_views_of_them():
    tie = [ones(3, 8)] * 3
    assert find_samples(tie, BatchSource(3)).lists == set()
    assert find_samples(tie, BatchSource(3, frozenset({()}))) == (3, {()}, ())
    labelled = {"images": tie, "y": ones(3)}
    assert find_samples(labelled, BatchSource(3)).lists == set()
    assert find_samples(labelled, BatchSource(3, frozenset({("images",)}))).lists == {("images",)}


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_is_cut_as_if_each_microbatch_had_packed_its_own(enforce_sorted):
    lengths = (5, 3, 3, 1) if enforce_sorted else (2, 5, 1, 4)
    sequences = [torch.randn(length, 2) for length in lengths]
    batch = (pack_sequence(sequences, enforce_sorted=enforce_sorted), ones(4))
    parts, sizes = split(batch, 2)
    assert sizes == (2, 2)
    for part, own in zip(parts, (sequences[:2], sequences[2:]), strict=True):
        expected = pack_sequence(own, enforce_sorted=enforce_sorted)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(part[0], expected, strict=True))
    assert all(map(torch.equal, unpack_sequence(merge(parts, sizes)[0]), sequences))


def test_nested_and_sparse_tensors_are_cut_by_samples():
    rows = [torch.randn(length, 2) for length in (2, 5, 1)]
    sparse = torch.eye(3).to_sparse()
    parts, _ = split({"rows": torch.nested.as_nested_tensor(rows, layout=torch.jagged), "sparse": sparse}, 2)
    assert [len(part["rows"].unbind()) for part in parts] == [2, 1]
    assert torch.equal(parts[1]["rows"].unbind()[0], rows[2])
    assert torch.equal(parts[1]["sparse"].to_dense(), torch.eye(3)[2:])


def test_what_broadcasts_is_given_to_every_microbatch():
    parts, _ = split({"x": ones(4, 3), "positions": ones(1, 3)}, 2)
    assert [list(part["positions"].shape) for part in parts] == [[1, 3]] * 2


class Encoding(collections.UserDict):
    encodings: Any = None


def test_lists_in_attributes_of_a_mapping_are_cut_with_its_items():
    batch = Encoding({"x": ones(4)})
    batch.encodings = ["a", "b", "c", "d"]
    parts, _ = split(batch, 2)
    assert [part.encodings for part in parts] == [["a", "b"], ["c", "d"]]
    assert batch.encodings == ["a", "b", "c", "d"]


class Graph:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    "graph",
    [
        Graph(x=ones(9, 2), y=ones(4)),
        Graph(x=ones(9, 2), starts=torch.tensor([0, 2, 3, 5, 9])),
        Graph(x=ones(9, 2), num_graphs=4),
        Graph(inner=Graph(y=ones(4))),
    ],
)
def test_an_object_that_holds_the_samples_is_refused_with_its_path(graph):
    with pytest.raises(UnsupportedError, match=r"`batch\['graph'\]` \(Graph\).*4 samples.*`smp_slice"):
        split({"graph": graph, "y": ones(4)}, 2)
    assert split({"graph": graph, "y": ones(4)}, 1)[0][0]["graph"] is graph


def test_an_object_that_holds_no_samples_stays_whole():
    graph = Graph(mean=ones(3), name="constants", call=len)
    assert [part["graph"] for part in split({"graph": graph, "y": ones(4)}, 2)[0]] == [graph, graph]
    items = [Graph(x=ones(4)), Graph(x=ones(4)), Graph(x=ones(4)), Graph(x=ones(4))]
    assert split({"graph": items, "y": ones(4)}, 2)[0][1]["graph"] == items[2:]


def test_what_has_another_number_of_samples_is_refused_with_its_path():
    batch = {"x": ones(4), "y": ones(4), "deep": [{"weights": ones(10, 2)}]}
    with pytest.raises(
        UnsupportedError, match=r"4 samples \(`batch\['x'\]`\).*\['deep'\]\[0\]\['weights'\]` .*\[10, 2\]"
    ):
        split(batch, 2)
