"""What a step switches for a while, kept apart while microbatches take turns.

A step freezes its adapters, computes a reference, and thaws them; it sets a flag, a scale or a mode, and sets it back.
A microbatch that pauses in between must not leave the others with that. But what a step counts must go on counting.

In one process a microbatch finds what the one before it has left in the end, and then what it has written itself. So
what a microbatch writes is its own until it ends: it is taken out when it pauses, and put back when it goes on. What
others, which begin in the meantime, find in such a place goes by what has become of it before, in the survey of the
step or in earlier microbatches. A place that is put back in the end is a *switch*: they find what was there before. Any
other is *state*: they find what has been written last. Of a place that was never seen to change, a number is taken for
state, everything else for a switch.

When a microbatch ends, what it has changed for good is there for all. A number that has been changed by others since it
was found has been counted by both: their changes are added up.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.errors import UnsupportedError

__all__ = ["MISSING", "SwitchPlace", "Switches", "is_same"]

MISSING: Any = object()
"""What is in a place that is empty."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class SwitchPlace(NamedTuple):
    """Where something stands: under a name in a mapping, which is known by a key that is its own."""

    key: int
    name: Any


@final
class Switches:
    """See the module docstring. One object lasts for all steps, and for the surveys before them."""

    def __init__(self) -> None:
        self._lasting: Mapping[int, MutableMapping[Any, Any]] = {}
        self._targets: Mapping[int, MutableMapping[Any, Any]] = {}
        # What has become of a place in the end: whether it was put back.
        self._was_put_back: dict[SwitchPlace, bool] = {}
        # Of each microbatch that has not ended: what it has written, and what it had found there.
        self._own: dict[int, dict[SwitchPlace, Any]] = {}
        self._found: dict[int, dict[SwitchPlace, Any]] = {}
        self._ended: set[int] = set()
        # Guesses that others have gone by: whose value of which place was taken for what stays.
        self._guessed: set[tuple[int, SwitchPlace]] = set()
        # Places that rehearsed steps have changed: how far microbatches may take turns goes by that.
        self._rehearsed: set[SwitchPlace] = set()
        # Microbatches that have begun, and places that others before them have changed since.
        self._begun: set[int] = set()
        self._overtaken: set[tuple[int, SwitchPlace]] = set()
        # By how much the first microbatch has changed numbers in this step.
        self._counted: dict[SwitchPlace, Any] = {}
        # During a turn: what the microbatch has found in places that it or others have written, and what is else there.
        self._given: dict[SwitchPlace, Any] = {}
        self._outside: dict[SwitchPlace, Any] = {}

    def begin(
        self, lasting: Mapping[int, MutableMapping[Any, Any]], targets: Mapping[int, MutableMapping[Any, Any]]
    ) -> None:
        """A step begins.

        Args:
            lasting: mappings, by key, in which it may write; the same in every step.
            targets: others. What is known of any that are missing is forgotten: their keys may come to mean others.
        """
        known = self._was_put_back.items()
        self._was_put_back = {place: was for place, was in known if place.key in targets or place.key in lasting}
        self._lasting, self._targets = lasting, targets
        self._own, self._found = {}, {}
        for each in (self._ended, self._guessed, self._begun, self._overtaken, self._counted):
            each.clear()

    @property
    def places(self) -> Collection[SwitchPlace]:
        """Those that are known."""
        return self._was_put_back.keys()

    def rehearse(self, places: Iterable[SwitchPlace]) -> None:
        """Steps that change ``places`` have been rehearsed: see :mod:`smp_strategy.engine.carried_state`."""
        self._rehearsed.update(places)

    @contextmanager
    def learning_nothing(self) -> Iterator[None]:
        """What becomes of places in here does not count."""
        before = dict(self._was_put_back)
        try:
            yield
        finally:
            self._was_put_back = before

    def learn(self, place: SwitchPlace, before: Any) -> None:
        """A pass has ended, in which something else than ``before`` was found in a place."""
        self._was_put_back[place] = is_same(self._get(place), before)

    def enter(self, microbatch: int) -> None:
        """A turn of ``microbatch`` begins: let it find what is its own."""
        self._begun.add(microbatch)
        if self._own:
            self._given = self._view(microbatch)
            self._outside = {place: self._get(place) for place in self._given}
            for place, value in self._given.items():
                self._set(place, value)

    def leave(
        self,
        microbatch: int,
        written: Iterable[tuple[SwitchPlace, Any]],
        dropped: Iterable[SwitchPlace] = (),
        was_set: Collection[SwitchPlace] = (),
    ) -> None:
        """It ends: take out what the microbatch has written.

        Args:
            microbatch: whose turn it was.
            written: places where there is something else than when the turn began, or that are known to have been set,
                and what was there then.
            was_set: places that are known to have been set, perhaps to what they were.
            dropped: places where there is a tensor of its own by now, which is kept elsewhere.
        """
        given, outside = self._given, self._outside
        self._given, self._outside = {}, {}
        changed = {place: before for place, before in written if place not in given}
        if not given and not changed:
            return
        own, found = self._own.setdefault(microbatch, {}), self._found.setdefault(microbatch, {})
        for place, before in (*given.items(), *changed.items()):
            value = self._get(place)
            if value is before and place not in changed and place not in was_set:
                continue
            found.setdefault(place, before)
            own[place] = value
            later = {number for number in self._begun if number > microbatch and place not in self._own.get(number, ())}
            self._overtaken.update((number, place) for number in later - self._ended)
        for place, before in (*outside.items(), *changed.items()):
            self._set(place, before)
        for place in dropped:
            own.pop(place, None)
        if not own:
            del self._own[microbatch]

    def end(self, microbatch: int) -> bool:
        """All of ``microbatch`` has run: what it has changed for good is there for all once those before it have ended.

        Returns:
            Whether something may be there now.

        Raises:
            UnsupportedError: others went by a number that it has changed for a while only.
        """
        self._ended.add(microbatch)
        ended = list(itertools.takewhile(self._ended.__contains__, sorted(self._own)))
        for number in ended:
            self._settle(number, is_through=True)
        return bool(ended)

    def end_all(self) -> None:
        """Nothing more is written."""
        for microbatch in sorted(self._own):
            self._settle(microbatch, is_through=microbatch in self._ended)

    @contextmanager
    def at_barrier(self, microbatch: int) -> Iterator[None]:
        """In here code runs once for all, and finds what ``microbatch``, the last one, finds."""
        self.enter(microbatch)
        try:
            yield
        finally:
            given, outside = self._given, self._outside
            self._given, self._outside = {}, {}
            for place, before in given.items():
                value = self._get(place)
                self._set(place, outside[place])
                if value is not before:
                    for own in self._own.values():
                        if place in own:
                            own[place] = value

    def of_now(self, written: Iterable[tuple[SwitchPlace, Any]]) -> Callable[[], AbstractContextManager[None]]:
        """Opens a context, out of turn, in which code finds what the microbatch whose turn it is finds now.

        Args:
            written: see :meth:`leave`.
        """
        noted = {place: self._get(place) for place in (*self._given, *(place for place, _ in written))}

        @contextmanager
        def again() -> Iterator[None]:
            wanted = {**self._outside, **noted}
            before = {place: self._get(place) for place in wanted}
            for place, value in wanted.items():
                self._set(place, value)
            try:
                yield
            finally:
                for place, value in before.items():
                    self._set(place, value)

        return again

    def _view(self, microbatch: int) -> dict[SwitchPlace, Any]:
        """What it finds in places that it has written, or others before it that have not ended."""
        view: dict[SwitchPlace, Any] = {}
        for number in sorted(number for number in self._own if number < microbatch):
            for place, value in self._own[number].items():
                was_put_back = self._was_put_back.get(place)
                if was_put_back is None and _is_number(value):
                    self._guessed.add((number, place))
                    view[place] = value
                elif was_put_back is False:
                    view[place] = value
        view.update(self._own.get(microbatch, {}))
        return view

    def _settle(self, microbatch: int, *, is_through: bool) -> None:
        own, found = self._own.pop(microbatch), self._found.pop(microbatch)
        for place, value in own.items():
            before, now = found[place], self._get(place)
            was_put_back = is_same(value, before)
            if was_put_back and is_through and (microbatch, place) in self._guessed:
                raise _late_switch(place.name, value)
            self._was_put_back[place] = was_put_back
            if was_put_back:
                continue
            if _is_number(value):
                self._check_counted(microbatch, place, value - (before if _is_number(before) else 0))
            if _is_number(value) and not is_same(now, before) and _is_number(0 if now is MISSING else now):
                value += (0 if now is MISSING else now) - (before if _is_number(before) else 0)
            self._set(place, value)

    def _check_counted(self, microbatch: int, place: SwitchPlace, change: Any) -> None:
        """Refuse a number that may have been read before others have changed it, unless all change it alike."""
        is_alike = change == self._counted.setdefault(place, change)
        if (microbatch, place) in self._overtaken and place not in self._rehearsed and not is_alike:
            raise _late_state(place.name)

    def _get(self, place: SwitchPlace) -> Any:
        return self._target(place).get(place.name, MISSING)

    def _set(self, place: SwitchPlace, value: Any) -> None:
        if value is MISSING:
            self._target(place).pop(place.name, None)
        else:
            self._target(place)[place.name] = value

    def _target(self, place: SwitchPlace) -> MutableMapping[Any, Any]:
        found = self._targets.get(place.key)
        return self._lasting[place.key] if found is None else found


def is_same(one: Any, other: Any) -> bool:
    """Whether nobody can tell the two apart: plain values and lists of them may have been made anew."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other) or isinstance(one, Tensor):
        return False
    if kind in _PLAIN:
        return bool(one == other)
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if kind is dict:
        return list(one) == list(other) and all(map(is_same, one.values(), other.values()))
    if kind in (set, frozenset):
        return all(type(item) in _PLAIN for item in (*one, *other)) and bool(one == other)
    return (
        getattr(one, "__func__", one) is getattr(other, "__func__", other)
        and hasattr(one, "__func__")
        and (one.__self__ is other.__self__)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _late_switch(name: Any, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"The step changes `{name}` for a while and puts {value!r} back, which it has not done before: microbatches "
        "that take turns have gone by the other value, as they do by what a step counts. Let the step do that from "
        "the first time on (with a factor of 1, say), use `True` and `False` or a name instead of a number, or set "
        "`microbatches=1`."
    )


def _late_state(name: Any) -> UnsupportedError:
    return UnsupportedError(
        f"The step changes `{name}`, and did not when it was surveyed: microbatches take turns, so that one may have "
        "read it before another has changed it. Let the step do that from the first time on (times 0, say), do it once "
        "per batch (in `on_train_batch_end`), or set `active_microbatches=1`, under which microbatches run one after "
        "the other."
    )
