"""What a function leaves in its arguments, told apart from what it returns."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from smp_strategy.model.trace.pytree import flatten_call, unflatten_call
from smp_strategy.model.trace.side_effects import Changed, apply_changes, containers_of_objects, watched
from smp_strategy.model.trace.snapshot import Snapshot


@dataclasses.dataclass
class Record:
    total: Any = 0
    parts: list[Any] = dataclasses.field(default_factory=list)


def call(function: Any, *args: Any) -> Any:
    """As a unit is called: with copies of the containers."""
    given, _ = unflatten_call(*flatten_call(args, {}))
    result = watched(function)(*given)
    return apply_changes(result, (args, {})) if isinstance(result, Changed) else result


def test_a_function_that_changes_nothing_returns_its_bare_result():
    assert watched(lambda x, names: x + len(names))(1, ["a"]) == 2


def test_changes_reach_the_containers_of_the_caller():
    def function(x: Tensor, found: list[Tensor], names: dict[str, Any], record: Record) -> str:
        found.append(x)
        del found[0]
        names["x"] = x
        names.pop("old")
        record.total = record.total + 1
        record.parts.append(x)
        return "result"

    x, found, names, record = torch.ones(1), [torch.zeros(1)], {"old": 1, "kept": 2}, Record()
    assert call(function, x, found, names, record) == "result"
    assert len(found) == 1
    assert found[0] is x
    assert names == {"kept": 2, "x": x}
    assert record.total == 1
    assert record.parts == [x]


def test_a_container_in_a_changed_container_stays_the_same_object():
    inner: list[int] = []
    outer = {"inner": inner, "count": 0}

    def function(outer: dict[str, Any]) -> None:
        outer["count"] += 1
        outer["inner"].append(1)

    call(function, outer)
    assert outer["inner"] is inner
    assert inner == [1]


class Cache:
    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.sizes = {"seen": 0}
        self.parent = self


def test_objects_get_back_what_was_in_them():
    cache, layer = Cache(), Cache()
    cache.layers.append(layer)
    before = Snapshot(containers=containers_of_objects([torch.ones(1), cache, 3, None]))
    layer.sizes["seen"] = 5
    layer.layers.append(torch.ones(1))
    cache.layers.clear()
    cache.sizes = {}
    cache.extra = 1
    before.restore()
    assert cache.layers == [layer]
    assert layer.layers == []
    assert layer.sizes == cache.sizes == {"seen": 0}
    assert not hasattr(cache, "extra")
