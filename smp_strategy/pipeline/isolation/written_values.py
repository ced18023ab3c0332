"""Values that microbatches write to shared places: what they contain, and who finds them."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from numbers import Number
from operator import is_
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.places import MOST_ENTRIES
from smp_strategy.model.trace.snapshot import refill, stored
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = [
    "MISSING",
    "Content",
    "Contents",
    "Items",
    "KnownPlaces",
    "Place",
    "Sight",
    "Write",
    "content_of",
    "is_identical",
    "is_number",
    "is_same_value",
    "late_state",
    "late_switch",
    "merged",
]

MISSING: Any = object()
"""Value of an empty place."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Levels of nested containers that are searched for tensors.
_MOST_LEVELS = 2


class Place(NamedTuple):
    """Place of a value: a name in a mapping."""

    key: int
    """Key that identifies the mapping."""
    name: Any


class Content(Enum):
    """Content of a value."""

    PLAIN = auto()
    """No tensors."""
    REAL = auto()
    """Real tensors."""
    PLACED = auto()
    """Tensors of one microbatch, or a container that it has made."""


class Sight(Enum):
    """Microbatches that find a value before the one that has written it ends.

    [Note: isolation] It depends on the value, and on what the microbatch has found in the place:

        written now      found there                     sight
        placed tensor    tensor or number, at first      LATER: a sum over microbatches, refused when it is used
        placed tensor    anything else                   OWN: a feature
        real tensor      tensor or number, at first      ALL: running statistics, which microbatches update in turn
        real tensor      anything else                   LATER: a mask or a cache
        no tensor        what was put back in the end    OWN: a switch
        no tensor        what was changed for good       LATER: state, such as a count
        no tensor        never seen to change            LATER if it is a number, else OWN
        items            items without tensors           ALL

    "At first" and "put back" are found out in the survey of a step, and last for all steps: after one write a running
    mean and a feature map look alike.
    """

    OWN = auto()
    """Only that microbatch."""
    LATER = auto()
    """That one, and those after it."""
    ALL = auto()
    """All of them: the value stays where it is."""


@final
@dataclass(slots=True)
class Write:
    """Value that a microbatch has written, and has not published."""

    before: Any
    """Value before its first write."""
    value: Any
    content: Content


@final
@dataclass
class KnownPlaces:
    """Knowledge about places, from surveys and earlier steps. One object lasts for all of them."""

    was_put_back: dict[Place, bool] = field(default_factory=dict)
    """Whether plain values were put back in the end."""
    is_running: dict[Place, bool] = field(default_factory=dict)
    """Whether there was a tensor or a number where tensors are written."""
    rehearsed: set[Place] = field(default_factory=set)
    """Places that rehearsed steps have changed: the rehearsal has chosen a safe order for these."""

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which nothing is learnt."""
        before = dict(self.was_put_back), dict(self.is_running)
        try:
            yield
        finally:
            self.was_put_back, self.is_running = before

    def forget_others(self, keys: Collection[int]) -> None:
        """Forget the places of mappings without a key in ``keys``: others may get their keys."""
        self.was_put_back = {place: was for place, was in self.was_put_back.items() if place.key in keys}
        self.is_running = {place: was for place, was in self.is_running.items() if place.key in keys}


class Contents(list[Any]):
    """Items of a list, a deque or a set at some time."""


@final
class Items(MutableMapping[str, Any]):
    """A list, a deque or a set as a mapping: its contents, under the name of its type."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._name = type(target).__name__

    def __iter__(self) -> Iterator[str]:
        return iter((self._name,))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> Contents:
        return Contents(self._target)

    def __setitem__(self, name: str, value: Contents) -> None:
        if not is_identical(value, Contents(self._target)):
            refill(self._target, value)

    def __delitem__(self, name: str) -> None:
        raise AssertionError("there are always contents, perhaps none")


def is_identical(one: Any, other: Any) -> bool:
    """Whether the two are one object, or contents with the same items."""
    if one is other:
        return True
    return type(one) is type(other) is Contents and len(one) == len(other) and all(map(is_, one, other))


def merged(now: Any, found: Any, value: Any) -> Any:
    """``now`` with the change from ``found`` to ``value``: others have counted, appended or filled slots since, too."""
    if is_identical(now, found) or is_same_value(now, found):
        return value
    if is_number(value) and (now is MISSING or is_number(now)):
        return value + (0 if now is MISSING else now) - (found if is_number(found) else 0)
    if not (isinstance(value, list) and isinstance(found, list) and isinstance(now, list)):
        return value
    if len(value) >= len(found) and all(map(is_, value, found)):
        return type(value)([*now, *value[len(found) :]])
    if len(value) == len(found) == len(now):
        slots = zip(now, found, value, strict=True)
        return type(value)([other if after is before else after for other, before, after in slots])
    return value


def content_of(value: Any, levels: int = _MOST_LEVELS) -> Content:
    if isinstance(value, Tensor):
        return Content.PLACED if isinstance(value, PlacedTensor) else Content.REAL
    if not levels or isinstance(value, (str, Number, nn.Module, type)):
        return Content.PLAIN
    if isinstance(value, (dict, list, set, deque)) and not value:
        return Content.PLACED  # new in this turn, and about to be filled with tensors
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = stored(value).values()
    elif isinstance(value, (list, tuple, set, deque)):
        inside = value
    elif hasattr(value, "__dict__") and not callable(value):
        inside = vars(value).values()
    contents = {content_of(item, levels - 1) for item in list(inside)[:MOST_ENTRIES]}
    if contents <= {Content.PLAIN}:
        return Content.PLAIN
    # A new mutable container belongs to the microbatch whatever it holds: it will be changed. A tuple cannot be.
    return Content.REAL if isinstance(value, tuple) and Content.PLACED not in contents else Content.PLACED


def is_same_value(one: Any, other: Any) -> bool:
    """Whether the two are indistinguishable; plain values and containers of them are compared by value."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other) or isinstance(one, Tensor):
        return False
    if kind in _PLAIN:
        return bool(one == other)
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    if kind is dict:
        return list(one) == list(other) and all(map(is_same_value, one.values(), other.values()))
    if kind in (set, frozenset):
        return all(type(item) in _PLAIN for item in (*one, *other)) and bool(one == other)
    return (
        getattr(one, "__func__", one) is getattr(other, "__func__", other)
        and hasattr(one, "__func__")
        and (one.__self__ is other.__self__)
    )


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number to count with; `True` and `False` are switches."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def late_switch(name: Any, value: Any) -> UnsupportedError:
    """Error of a number that was put back, although microbatches have gone by it as a count."""
    return UnsupportedError(
        f"The step changes `{name}` for a while and puts {value!r} back, which it has not done before: microbatches "
        "that take turns have gone by the other value, as they do by what a step counts. Let the step do that from "
        "the first time on (with a factor of 1, say), use `True` and `False` or a name instead of a number, or set "
        "`microbatches=1`."
    )


def late_state(name: Any) -> UnsupportedError:
    """Error of a number that microbatches may have read before an earlier one had changed it."""
    return UnsupportedError(
        f"The step changes `{name}`, and did not when it was surveyed: microbatches take turns, so that one may have "
        "read it before another has changed it. Let the step do that from the first time on (times 0, say), do it once "
        "per batch (in `on_train_batch_end`), or set `active_microbatches=1`, under which microbatches run one after "
        "the other."
    )
