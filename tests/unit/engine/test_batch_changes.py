"""Changes of microbatches, merged into their batch."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.engine.batch_changes import apply_changes, changes_since, contents_of_batch
from smp_strategy.pipeline.microbatch import split


def changed(batch: Any, step: Any, num: int = 2) -> Any:
    """``batch`` after ``step`` on each of its microbatches."""
    microbatches, sizes = split(batch, num)
    found = []
    for each in microbatches:
        before = contents_of_batch(each)
        step(each)
        found.append(changes_since(before))
    apply_changes(batch, found, sizes)
    return batch


def shown(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: shown(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(shown(item) for item in tree)
    if isinstance(tree, Tensor):
        return tree.tolist()
    return shown(vars(tree)) if hasattr(tree, "__dict__") else tree


@dataclass
class Data:
    x: Tensor
    note: Any = None


X = torch.arange(4.0)


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda views: views.pop(), [1.5]),
        (lambda views: views.append("new"), [1.5, 2.5, "new"]),
        (lambda views: views.insert(0, "x"), ["x", 1.5, 2.5]),
        (lambda views: views.clear(), []),
        (lambda views: None, [1.5, 2.5]),
    ],
)
def test_lists_change_as_their_parts(change, left, num):
    assert changed({"x": X, "views": [1.5, 2.5]}, lambda batch: change(batch["views"]), num)["views"] == left


def test_whole_numbers_are_counts_which_add_up():
    def step(batch):
        batch["counts"].insert(0, "x")

    assert changed({"x": X, "counts": [1, 2, 3]}, step)["counts"] == ["x", 2, 4, 6]


@pytest.mark.parametrize("num", [1, 2, 3])
def test_keys_of_a_batch_are_set_popped_and_replaced(num):
    def step(batch):
        batch["pred"] = batch.pop("x") * 2
        batch["y"] = batch["y"] + 1

    assert shown(changed({"x": X, "y": X, "z": X}, step, num)) == shown({"y": X + 1, "z": X, "pred": X * 2})


@pytest.mark.parametrize("num", [1, 2, 3])
def test_what_is_nested_in_a_batch_changes_as_in_one_process(num):
    def made():
        inner = {"a": X.clone(), "deep": [X.clone(), {"k": X + 1}]}
        return {"x": X, "inner": inner, "data": Data(X.clone()), "space": SimpleNamespace(name="s"), "pair": (X, {})}

    def step(batch):
        batch["inner"]["deep"][1]["k2"] = batch["inner"]["deep"][1].pop("k")
        batch["inner"]["deep"].append(batch["x"] - 1)
        batch["inner"]["a"] = batch["inner"]["a"] * 3
        batch["data"].note = {"inside": batch["x"]}
        batch["data"].x = batch["x"] + 2
        batch["space"].more = batch["x"]
        batch["pair"][1]["new"] = batch["x"]

    expected = made()
    step(expected)
    assert shown(changed(made(), step, num)) == shown(expected)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_entries_of_samples_stay_with_their_samples(num):
    def made():
        return {"x": X, "names": list("abcd"), "targets": [{"boxes": torch.ones(n)} for n in (1, 2, 3, 1)]}

    def step(batch):
        for place, name in enumerate(batch["names"]):
            batch["names"][place] = name * 2
        for place, (target, x) in enumerate(zip(batch["targets"], batch["x"], strict=True)):
            target["pred"] = x
            target.pop("boxes") if place % 2 else None
        batch["names"].append("end")

    expected = made()
    step(expected)
    if num == 3:  # places in a microbatch: 0 1, 0, 0
        expected["targets"][3]["boxes"] = torch.ones(1)
    assert shown(changed(made(), step, num)) == shown(expected)


@pytest.mark.parametrize("num", [1, 2])
def test_what_moves_in_a_list_keeps_its_own_changes(num):
    def made():
        return {"x": X, "views": [{"a": X}, {"b": X}]}

    def step(batch):
        batch["views"][0]["new"] = batch["x"] + 1
        batch["views"].insert(0, batch["x"])

    expected = made()
    step(expected)
    assert shown(changed(made(), step, num)) == shown(expected)


def test_an_object_that_all_microbatches_share_gets_the_joined_values():
    class Graph:
        def __init__(self):
            self.inner = {"edges": [0, 1]}

    graph = Graph()

    def step(batch):
        batch["graph"].inner["pred"] = batch["x"]
        batch["graph"].h = batch["x"] + 1

    changed({"x": X, "graph": graph}, step)
    assert shown(graph) == shown({"inner": {"edges": [0, 1], "pred": X}, "h": X + 1})


def test_a_batch_that_holds_itself_has_an_end():
    batch = {"x": X}
    batch["self"] = batch
    before = contents_of_batch(batch)
    batch["new"] = 1.0
    assert set(changes_since(before).found) == {()}
