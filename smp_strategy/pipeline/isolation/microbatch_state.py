"""Per-microbatch state: what a microbatch writes to shared objects, swapped out while others run.

The user's code is written for one pass at a time: ``self.features = h`` in ``forward``, a hook that fills a dict or a
list, adapters that are switched off for a reference and on again. Microbatches that take turns would find each other's
values there. In a single process a microbatch finds the final values of those before it, and then its own. So each turn
ends with taking the microbatch's values out and begins with putting them back ([Note: isolation] below). The places are
attributes of the glue; dicts, lists, sets and objects in these attributes and in context variables; variables and
arguments of hooks; variables of the user's code; attributes of modules inside of units that code above them sets;
``requires_grad``, and settings of PyTorch. After the step all values are back, as if one microbatch had run after the
other: a list has the items that each has appended, an attribute the value that the last one wrote.

A step whose microbatches would find something else than in a single process is found by a rehearsal
(:mod:`smp_strategy.engine.carried_state`), and runs its microbatches one after the other.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Number
from operator import is_
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.model.trace.places import Variables, places_of_step, variables_of
from smp_strategy.model.trace.snapshot import delete_item, set_items, stored
from smp_strategy.pipeline.isolation.rehearsal import frozen
from smp_strategy.pipeline.isolation.torch_switches import TorchSwitches
from smp_strategy.pipeline.isolation.writes import BufferWrites
from smp_strategy.pipeline.isolation.written_values import (
    MISSING,
    Content,
    Contents,
    Items,
    KnownPlaces,
    Place,
    Sight,
    Write,
    content_of,
    is_identical,
    is_number,
    is_same_value,
    late_state,
    late_switch,
    merged,
)

__all__ = ["MicrobatchState"]


@final
class MicrobatchState:
    """State of the microbatches of each step. One object lasts for all steps.

    Args:
        units: units; their own attributes count only if hooks may set them.
        exposed: returns the modules inside of units whose attributes code above the units reads.
    """

    def __init__(
        self,
        glue: Sequence[nn.Module],
        units: Sequence[nn.Module],
        exposed: Callable[[], Sequence[nn.Module]] = lambda: (),
        known: KnownPlaces | None = None,
    ) -> None:
        self._glue, self._units, self._exposed = glue, units, exposed
        self._known = known or KnownPlaces()
        self._variables: Variables | None = None
        # Mappings that a step may write to, by key. The first ones are the same in every step; they are not compared,
        # but report their changes (`touch`, `changed`).
        self._lasting: dict[int, MutableMapping[Any, Any]] = {}
        self._switches = TorchSwitches(())
        self._mappings: dict[int, MutableMapping[Any, Any]] = {}
        self._buffer_writes = BufferWrites(())
        # Of each microbatch that has not ended, and features of those that have.
        self._own: dict[int, dict[Place, Write]] = {}
        self._begun, self._ended = set[int](), set[int]()
        # Numbers of others that a microbatch has found and that may be put back.
        self._guessed: set[tuple[int, Place]] = set()
        # Microbatches that have begun, and places that others before them have changed since.
        self._overtaken: set[tuple[int, Place]] = set()
        # Change of each number by the first microbatch of this step.
        self._counted: dict[Place, Any] = {}
        # During a turn: entries of the mappings when it began, values swapped in, those that they have displaced, and
        # values of attributes before they were set.
        self._shared: dict[int, dict[Any, Any]] = {}
        self._swapped_in: dict[Place, Any] = {}
        self._swapped_out: dict[Place, Any] = {}
        self._touched: dict[Place, Any] = {}
        self._in_turn = False
        self._seen: dict[Place, Any] = {}

    def begin(self, step: Callable[..., Any] | None = None) -> None:
        """Find the places that a ``step``, whose code may name variables, may write to; call it before its microbatches
        take turns.
        """
        if self._variables is None:
            self._look_around(step)
        assert self._variables is not None
        found = places_of_step(self._glue, self._units, self._exposed(), self._variables).items()
        self._mappings = {key: each if isinstance(each, MutableMapping) else Items(each) for key, each in found}
        self._known.forget_others(self._mappings.keys() | self._lasting.keys())
        for each in (self._own, self._begun, self._ended, self._guessed, self._overtaken, self._counted):
            each.clear()
        self._switches.begin()
        self._buffer_writes = BufferWrites(self._glue)

    def _look_around(self, step: Callable[..., Any] | None) -> None:
        parts = [*self._glue, *(part for unit in self._units for part in unit.modules())]
        self._variables = variables_of(parts, step)
        parameters = list(dict.fromkeys(weight for part in parts for weight in part.parameters(recurse=False)))
        switches = self._switches = TorchSwitches(parameters)
        self._lasting = {id(switches): switches}
        self._lasting |= {id(held): held for part in parts for held in (vars(part), part._modules)}

    def touch(self, module: nn.Module, name: str) -> None:
        """Note the value of an attribute of ``module`` before code above the units sets or deletes it."""
        if self._in_turn:
            for held in (vars(module), module._modules):
                place = Place(id(held), name)
                if place.key in self._lasting and place not in self._touched:
                    self._touched[place] = held.get(name, MISSING)

    @contextmanager
    def learning(self, step: Callable[..., Any]) -> Iterator[None]:
        """Context for a dry run of ``step`` with one microbatch, which shows what becomes of plain values."""
        self.begin(step)
        self.enter(0)
        try:
            yield
            self.look()
            for place, before in self._seen.items():
                self._known.was_put_back[place] = is_same_value(self._get(place), before)
        finally:
            self._in_turn, self._touched, self._seen = False, {}, {}

    def look(self) -> None:
        """Note changed plain values; called under :meth:`learning` wherever a microbatch could pause."""
        for place, before in self._changes():
            if content_of(self._get(place)) is Content.PLAIN:
                self._seen.setdefault(place, before)

    def _changes(self) -> Iterator[tuple[Place, Any]]:
        """Places whose value has changed since the turn began, or was set, with the value before."""
        yield from self._touched.items()
        for key, mapping in self._mappings.items():
            target, shared = stored(mapping), self._shared[key]
            # The usual turn changes nothing. `is`, because `==` of tensors computes.
            if len(target) == len(shared) and all(map(is_, target.values(), shared.values())):
                continue
            yield from ((Place(key, name), before) for name, before in shared.items() if name not in target)
            for name, value in target.items():
                if not is_identical(value, before := shared.get(name, MISSING)):
                    yield Place(key, name), before
        yield from ((Place(id(self._switches), name), before) for name, before in self._switches.changed())

    def snapshot(self) -> dict[Place, Any]:
        places = {Place(key, name) for key, mapping in self._mappings.items() for name in mapping}
        places |= {place for place in self._known.was_put_back if place.key in self._lasting}
        return {place: frozen(self._get(place)) for place in places}

    # Turns

    def enter(self, microbatch: int) -> None:
        """Begin a turn of ``microbatch``: put in what it finds."""
        self._begun.add(microbatch)
        self._shared = {key: dict(stored(mapping)) for key, mapping in self._mappings.items()}
        if self._own:
            self._swapped_in = self._view(microbatch)
            self._swapped_out = self._swap(self._swapped_in)
        self._in_turn = True

    def leave(self, microbatch: int) -> None:
        """End a turn of ``microbatch``: take out what it has written."""
        self._in_turn = False
        given, outside, touched = self._swapped_in, self._swapped_out, self._touched
        changed = {place: before for place, before in self._changes() if place not in given}
        self._swapped_in, self._swapped_out, self._touched, self._shared = {}, {}, {}, {}
        shared = dict[Place, Any]()
        for place, before in (*given.items(), *changed.items()):
            # `before` is what this turn has found, `was` what all others find: the same, unless one was swapped in.
            value, was = self._get(place), outside.get(place, before)
            is_written = place in changed or place in touched or not is_identical(value, before)
            if not is_written or self._note(microbatch, place, Write(before, value, content_of(value)), was):
                shared[place] = was
        self._swap(shared)
        self._buffer_writes.note(microbatch)

    def _note(self, microbatch: int, place: Place, write: Write, shared: Any) -> bool:
        """Note a value that ``microbatch`` has written instead of ``shared``; returns whether it is taken out."""
        own = self._own.setdefault(microbatch, {})
        # By the first write of all steps: see "at first" in [Note: isolation].
        if write.content is not Content.PLAIN:
            self._known.is_running.setdefault(place, isinstance(shared, (Tensor, Number)))
        if self._sight(place, write) is Sight.ALL and not (place in own and isinstance(write.value, Contents)):
            own.pop(place, None)
            return False
        if place in own:
            write.before = own[place].before
        own[place] = write
        # They may have read the value that this write replaces, which a single process would not have shown them.
        later = {each for each in self._begun if each > microbatch and place not in self._own.get(each, ())}
        self._overtaken.update((number, place) for number in later - self._ended)
        return True

    def _sight(self, place: Place, write: Write) -> Sight:
        """See [Note: isolation]."""
        if write.content is Content.PLAIN:
            if isinstance(write.value, Contents):
                return Sight.ALL
            was_put_back = self._known.was_put_back.get(place, not is_number(write.value))
            return Sight.OWN if was_put_back else Sight.LATER
        if write.content is Content.REAL:
            return Sight.ALL if self._known.is_running[place] else Sight.LATER
        return Sight.LATER if self._known.is_running[place] else Sight.OWN

    def _view(self, microbatch: int) -> dict[Place, Any]:
        """Values for ``microbatch`` of the places that it, or an earlier one that has not ended, has written."""
        view: dict[Place, Any] = {}
        for number in sorted(number for number in self._own if number < microbatch):
            for place, write in self._own[number].items():
                if self._sight(place, write) is Sight.LATER:
                    view[place] = write.value
                    # Not known to be put back in the end, but it may be: `_publish` looks whether it was.
                    if write.content is Content.PLAIN and place not in self._known.was_put_back:
                        self._guessed.add((number, place))
        return view | {place: write.value for place, write in self._own.get(microbatch, {}).items()}

    def end_of(self, microbatch: int) -> None:
        """End ``microbatch``: publish its lasting changes as soon as all earlier microbatches have ended.

        Raises:
            UnsupportedError: others have relied on a number that it has changed only temporarily.
        """
        self._ended.add(microbatch)
        ended = list(itertools.takewhile(self._ended.__contains__, sorted(self._own)))
        for number in ended:
            self._publish(number, is_through=True)
        if ended:
            self._switches.begin()

    def end(self) -> None:
        """End the step: put everything back, in the order of the microbatches."""
        for number in sorted(self._own):
            self._publish(number, is_through=number in self._ended, is_over=True)
        self._own = {}

    def _publish(self, microbatch: int, *, is_through: bool, is_over: bool = False) -> None:
        """Make the changes of ``microbatch`` visible to all, except features, which are its own until the step ends."""
        own = self._own.pop(microbatch)
        for place, write in own.items():
            now = self._get(place)
            if write.content is Content.PLAIN:
                was_put_back = self._known.was_put_back[place] = is_same_value(write.value, write.before)
                if was_put_back and is_through and (microbatch, place) in self._guessed:
                    raise late_switch(place.name, write.value)
                if was_put_back:
                    continue
                self._check_counted(microbatch, place, write)
            elif not is_over and self._sight(place, write) is Sight.OWN:
                self._own.setdefault(microbatch, {})[place] = write
                continue
            self._swap({place: merged(now, write.before, write.value)})

    @contextmanager
    def at_barrier(self, microbatch: int) -> Iterator[None]:
        """Context for code that runs once for all, with the view of ``microbatch``, the last one."""
        given = self._view(microbatch)
        outside = self._swap(given)
        try:
            yield
        finally:
            for place, value in self._swap(outside).items():
                before = given[place]
                for own in () if is_identical(value, before) else self._own.values():
                    if place in own:
                        own[place] = Write(own[place].before, value, content_of(value))
            # Freezing or setting at a barrier (`toggle_optimizer`) holds for all, and is no change of the next one.
            self._switches.begin()

    def of_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Capture the plain values that the running microbatch finds and has written; returns a factory of contexts in
        which code out of turn (recomputation) finds them.
        """
        if not self._in_turn:
            return nullcontext
        places = (*self._swapped_in, *(place for place, _ in self._changes()))
        values = ((place, self._get(place)) for place in places)
        noted = {place: value for place, value in values if content_of(value) is Content.PLAIN}

        @contextmanager
        def again() -> Iterator[None]:
            before = self._swap({**self._swapped_out, **noted})
            try:
                yield
            finally:
                self._swap(before)

        return again

    def _check_counted(self, microbatch: int, place: Place, write: Write) -> None:
        """Refuse a number that may have been read before others changed it, unless all change it alike."""
        if not is_number(write.value):
            return
        change = write.value - (write.before if is_number(write.before) else 0)
        is_alike = change == self._counted.setdefault(place, change)
        if (microbatch, place) in self._overtaken and place not in self._known.rehearsed and not is_alike:
            raise late_state(place.name)

    def _get(self, place: Place) -> Any:
        return self._target(place.key).get(place.name, MISSING)

    def _swap(self, values: Mapping[Place, Any]) -> dict[Place, Any]:
        """Put ``values`` into their places; returns those that were there."""
        before = {place: self._get(place) for place in values}
        together: dict[int, dict[Any, Any]] = {}
        for place, value in values.items():
            if value is not MISSING:
                together.setdefault(place.key, {})[place.name] = value
            elif before[place] is not MISSING:
                delete_item(self._target(place.key), place.name)
        # All entries of a dict at once: a loop over an emptied one goes on where the microbatch was paused.
        for key, named in together.items():
            set_items(self._target(key), named)
        return before

    def _target(self, key: int) -> MutableMapping[Any, Any]:
        found = self._mappings.get(key)
        return self._lasting[key] if found is None else found
