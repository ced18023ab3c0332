"""Plain values that a step changes, temporarily or for good, isolated between interleaved microbatches.

A step freezes its adapters, computes a reference, and thaws them; it sets a flag, a scale or a mode, and sets it back.
Other microbatches that run during a pause must not see that. But counters of a step must keep counting.

In a single process a microbatch finds the final values of the previous one, and then its own writes. So the writes of a
microbatch are its own until it ends: they are taken out when it pauses, and put back when it resumes. A microbatch that
begins in the meantime finds a value that depends on the history of the place, in the survey of the step or in earlier
microbatches. A place that is put back in the end is a *switch*: others find the value from before. Any other place is
*state*: others find the value written last. If a place was never seen to change, a number is taken for state,
everything else for a switch.

When a microbatch ends, its lasting changes become visible to all. If others have changed a number since it was found,
both have counted: their changes are added up.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.snapshot import delete_item, set_item

__all__ = ["MISSING", "SwitchPlace", "Switches", "is_same"]

MISSING: Any = object()
"""Value of an empty place."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class SwitchPlace(NamedTuple):
    """Place of a value: a name in a mapping."""

    key: int
    """Key that identifies the mapping."""
    name: Any


@final
class Switches:
    """Switches and state of the microbatches. One object lasts for all steps, and for the surveys before them."""

    def __init__(self) -> None:
        self._lasting: Mapping[int, MutableMapping[Any, Any]] = {}
        self._targets: Mapping[int, MutableMapping[Any, Any]] = {}
        # History of each place: whether it was put back in the end (a switch).
        self._was_put_back: dict[SwitchPlace, bool] = {}
        # Of each microbatch that has not ended: the values it has written, and those it had found there.
        self._own: dict[int, dict[SwitchPlace, Any]] = {}
        self._found: dict[int, dict[SwitchPlace, Any]] = {}
        self._ended: set[int] = set()
        # Guesses that others have relied on: microbatch and place whose value was taken for state.
        self._guessed: set[tuple[int, SwitchPlace]] = set()
        # Places that rehearsed steps have changed: the rehearsal has chosen a safe order for these.
        self._rehearsed: set[SwitchPlace] = set()
        # Microbatches that have begun, and places that others before them have changed since.
        self._begun: set[int] = set()
        self._overtaken: set[tuple[int, SwitchPlace]] = set()
        # Change of each number by the first microbatch of this step.
        self._counted: dict[SwitchPlace, Any] = {}
        # During a turn: values swapped in for the microbatch, and those that they have displaced.
        self._given: dict[SwitchPlace, Any] = {}
        self._outside: dict[SwitchPlace, Any] = {}

    def begin(
        self, lasting: Mapping[int, MutableMapping[Any, Any]], targets: Mapping[int, MutableMapping[Any, Any]]
    ) -> None:
        """Begin a step.

        Args:
            lasting: mappings that it may write to, by key; the same in every step.
            targets: further mappings, by key. The history of any that are missing is forgotten: keys may be reused.
        """
        known = self._was_put_back.items()
        self._was_put_back = {place: was for place, was in known if place.key in targets or place.key in lasting}
        self._lasting, self._targets = lasting, targets
        self._own, self._found = {}, {}
        for each in (self._ended, self._guessed, self._begun, self._overtaken, self._counted):
            each.clear()

    @property
    def places(self) -> Collection[SwitchPlace]:
        """Places with a history."""
        return self._was_put_back.keys()

    def rehearse(self, places: Iterable[SwitchPlace]) -> None:
        """Note that steps that change ``places`` were rehearsed; see :mod:`smp_strategy.engine.carried_state`."""
        self._rehearsed.update(places)

    @contextmanager
    def learning_nothing(self) -> Iterator[None]:
        """Context in which the history of places is not changed."""
        before = dict(self._was_put_back)
        try:
            yield
        finally:
            self._was_put_back = before

    def learn(self, place: SwitchPlace, before: Any) -> None:
        """Add to the history of a place whose value differed from ``before`` during a pass that has ended."""
        self._was_put_back[place] = is_same(self._get(place), before)

    def enter(self, microbatch: int) -> None:
        """Begin a turn of ``microbatch``: swap in its view."""
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
        """End a turn of ``microbatch``: take out its writes.

        Args:
            microbatch: microbatch of the turn.
            written: places that have changed in the turn, or are known to have been set, with their values before.
            dropped: places that hold a tensor of the microbatch by now, which is kept elsewhere.
            was_set: places that are known to have been set, perhaps to the same value.
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
        """End ``microbatch``: publish its lasting changes as soon as all earlier microbatches have ended.

        Returns:
            Whether changes may have been published.

        Raises:
            UnsupportedError: others have relied on a number that it has changed only temporarily.
        """
        self._ended.add(microbatch)
        ended = list(itertools.takewhile(self._ended.__contains__, sorted(self._own)))
        for number in ended:
            self._settle(number, is_through=True)
        return bool(ended)

    def end_all(self) -> None:
        """End the step: publish the lasting changes of all microbatches."""
        for microbatch in sorted(self._own):
            self._settle(microbatch, is_through=microbatch in self._ended)

    @contextmanager
    def at_barrier(self, microbatch: int) -> Iterator[None]:
        """Context for code that runs once for all, with the view of ``microbatch``, the last one."""
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
        """Capture the current view of the running microbatch.

        Args:
            written: places changed in the turn; see :meth:`leave`.

        Returns:
            A factory of contexts in which code out of turn (recomputation) finds this view.
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
        """Values for ``microbatch`` of the places that it, or an earlier one that has not ended, has written."""
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
        """Refuse a number that may have been read before others changed it, unless all change it alike."""
        is_alike = change == self._counted.setdefault(place, change)
        if (microbatch, place) in self._overtaken and place not in self._rehearsed and not is_alike:
            raise _late_state(place.name)

    def _get(self, place: SwitchPlace) -> Any:
        return self._target(place).get(place.name, MISSING)

    def _set(self, place: SwitchPlace, value: Any) -> None:
        if value is MISSING:
            if place.name in self._target(place):
                delete_item(self._target(place), place.name)
        else:
            set_item(self._target(place), place.name, value)

    def _target(self, place: SwitchPlace) -> MutableMapping[Any, Any]:
        found = self._targets.get(place.key)
        return self._lasting[place.key] if found is None else found


def is_same(one: Any, other: Any) -> bool:
    """Whether the two are indistinguishable; plain values and containers of them are compared by value."""
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
