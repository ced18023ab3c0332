"""Arguments of a call in another dtype."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.precision.mixed_precision import Casting

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Bag:
    x: Any
    name: str


@dataclass
class Late:
    x: Any
    later: Any = field(init=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Late) and self.x is other.x


def cast(value: Any) -> Any:
    return Casting(torch.bfloat16).of(value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floating_point_tensors_are_cast(dtype):
    assert cast(torch.ones(2, dtype=dtype)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "value",
    [
        *(torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64)),
        *(3, 2.5, None, "text", torch.float32, slice(1), object()),
        *((1, "a"), [1, torch.arange(3)], {"mask": torch.ones(2, dtype=torch.bool)}, Bag(1, "a"), Pair(1, 2)),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_what_needs_no_cast_stays_the_same_object(value):
    assert cast(value) is value


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda x: (1, x), lambda found: found[1]),
        (lambda x: Pair(1, x), lambda found: found.right),
        (lambda x: [x], lambda found: found[0]),
        (lambda x: {"a": {"b": x}}, lambda found: found["a"]["b"]),
        (lambda x: OrderedDict(a=x), lambda found: found["a"]),
        (lambda x: defaultdict(list, a=x), lambda found: found["a"]),
        (lambda x: Bag([x], "a"), lambda found: found.x[0]),
        (lambda x: Late(x), lambda found: found.x),
    ],
    ids=["tuple", "named tuple", "list", "dict", "ordered dict", "default dict", "dataclass", "field without value"],
)
def test_tensors_in_nests_are_cast_and_the_nest_is_left_as_it_was(make, take):
    x = torch.ones(2)
    given = make(x)
    found = cast(given)
    assert type(found) is type(given)
    assert take(found).dtype == torch.bfloat16
    assert take(given) is x


def test_what_is_put_into_a_container_arrives_in_the_callers():
    x, new = torch.ones(2), torch.zeros(1)
    items, named = [x], {"x": x, "old": 1}
    casting = Casting(torch.bfloat16)
    given_items, given_named = casting.of((items, named))
    given_items.append(new)
    given_named["new"] = new
    del given_named["old"]
    casting.finish("Block")
    assert items[0] is x
    assert items[1] is new
    assert named["x"] is x
    assert named["new"] is new
    assert "old" not in named


def test_gradients_come_back_in_the_dtype_of_the_argument():
    x = torch.ones(2, requires_grad=True)
    cast(x).sum().backward()
    assert x.grad.dtype == torch.float32


def test_a_change_in_place_of_a_cast_is_refused():
    casting = Casting(torch.bfloat16)
    given: Tensor = casting.of(torch.ones(2))
    given.add_(1)
    with pytest.raises(UnsupportedError, match=r"`Block` changes an argument of shape \[2\] in place"):
        casting.finish("Block")
    casting = Casting(torch.bfloat16)
    casting.of(torch.ones(2, dtype=torch.bfloat16)).add_(1)
    casting.finish("Block")


def test_a_tensor_that_comes_twice_is_cast_once():
    """Attention asks whether its queries are its keys."""
    x, y = torch.ones(2), torch.ones(2)
    (first, [second]), named = cast(((x, [x]), {"other": y, "same": x}))
    assert first is second is named["same"]
    assert named["other"] is not first


def test_a_dict_of_another_kind_keeps_its_kind_and_gets_new_items():
    given = defaultdict(list, a=torch.ones(2))
    casting = Casting(torch.bfloat16)
    found = casting.of(given)
    found["b"].append(1)
    casting.finish("unit")
    assert given["a"].dtype == torch.float32
    assert given["b"] == [1]
