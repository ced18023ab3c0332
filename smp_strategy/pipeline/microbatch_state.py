"""Per-microbatch state: the tensors that a microbatch leaves in shared objects, swapped out while others run.

The user's code is written for one pass at a time: ``self.features = h`` in ``forward``, a hook that fills a dict or a
list, a loss that reads it at the end. Interleaved microbatches would find each other's tensors there. So each turn ends
with taking the microbatch's tensors out and begins with putting them back ([Note: private state] below). The places are
attributes of the glue; dicts, lists, sets and objects in these attributes and in context variables; variables and
arguments of hooks. After the step all tensors are back, as if one microbatch had run after the other: a list has the
items that each has appended, an attribute the value that the last one wrote.

A running sum of *placed* tensors would tie microbatches together: it is refused, by a dry run of two microbatches
(:mod:`smp_strategy.engine.dry_run`) or when a microbatch finds a tensor of another.

Plain values in these places, in attributes of modules inside of units, and in variables of the user's code are switches
or state: :mod:`smp_strategy.pipeline.switches` keeps them apart.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Number
from operator import is_
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.model.trace.side_effects import collectors
from smp_strategy.model.trace.snapshot import delete_item, refill, set_item, set_items, stored
from smp_strategy.model.trace.undo_variables import Chosen, ClassAttributes, Variable, Variables, variables_of
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.rehearsal import frozen
from smp_strategy.pipeline.switches import MISSING, Switches, SwitchPlace
from smp_strategy.pipeline.torch_switches import Frozen, TorchSettings
from smp_strategy.pipeline.writes import BufferWrites

__all__ = ["MicrobatchState", "reached_by_hooks"]

# Larger containers (vocabularies, histories of an epoch) are not looked into: it would cost more than it is worth.
MOST_ENTRIES = 1000
# Levels of nested containers that are searched, counted from an attribute.
MOST_LEVELS = 2

_CONTAINERS = (dict, list, set, deque)
# Attributes of every module that hold no values of a step.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

# [Note: private state]
# At the end of a turn each place with a value that the microbatch has changed is sorted by what it holds (`_kind`):
#
#     found there first   written now         at the end of the turn
#     tensor or number    real tensor         shared: running statistics, which all microbatches update in turn
#     tensor or number    placed tensor       own, and left there: a sum over microbatches, refused when it is used
#     anything else       real tensor         own, and left there too: a mask or cache that others may use
#     anything else       placed tensor       own, and taken out: another microbatch must not see it
#     anything            no tensor           left there; `switches.py` decides
#
# "Found there first" is decided once per place and lasts for all steps, because after one write a running mean and a
# feature map look alike.


@final
class MicrobatchState:
    """Private state of the microbatches of each step. One object lasts for all steps.

    Args:
        glue: modules above the units.
        units: units; their own attributes count only if hooks may set them.
        exposed: returns the modules inside of units whose attributes code above the units reads.
        switches: knowledge about places with plain values, from surveys.
    """

    def __init__(
        self,
        glue: Sequence[nn.Module],
        units: Sequence[nn.Module],
        exposed: Callable[[], Sequence[nn.Module]] = lambda: (),
        switches: Switches | None = None,
    ) -> None:
        self._glue = glue
        self._units = units
        self._exposed = exposed
        self._switches = switches or Switches()
        self._holders: dict[int, _Names | _Items] = {}
        self._settings: dict[int, Frozen | TorchSettings] = {}
        self._own: dict[int, list[Any]] = {}
        self._buffer_writes = BufferWrites(())
        self._variables: Variables | None = None
        self._written: Sequence[Any] = ()
        # Attributes of modules, mostly inside of units, that this turn has written to, with their values before.
        self._touched: dict[SwitchPlace, Any] = {}
        self._touchable: dict[int, Any] = {}
        self._lasting: dict[int, Any] = {}
        self._seen: dict[SwitchPlace, Any] = {}
        self._in_turn = False

    def begin(self, step: Callable[..., Any] | None = None) -> None:
        """Find the places that a step may write to; call it before its microbatches take turns.

        Args:
            step: the step, whose code may name variables.
        """
        if self._variables is None:
            self._look_around(step)
        known = self._holders
        self._own = {}
        self._holders = {}
        for target in self._find():
            # Holders last: the first value decides whether a place holds running statistics, see [Note: private state].
            kind = _Items if isinstance(target, (list, set, deque)) else _Names
            key = _key(target)
            self._holders[key] = known.get(key) or kind(target)
        names = {key: each.target for key, each in self._holders.items() if isinstance(each, _Names)}
        self._switches.begin(self._lasting, names)
        for setting in self._settings.values():
            setting.begin()
        self._buffer_writes = BufferWrites(self._glue)

    def _look_around(self, step: Callable[..., Any] | None) -> None:
        parts = [*self._glue, *(part for unit in self._units for part in unit.modules())]
        self._variables = variables_of(parts, step)
        self._written = self._variables.written()
        self._touchable = {id(held): held for part in parts for held in (vars(part), part._modules)}
        parameters = list(dict.fromkeys(weight for part in parts for weight in part.parameters(recurse=False)))
        self._settings = {id(each): each for each in (Frozen(parameters), TorchSettings())}
        self._lasting = {**self._touchable, **self._settings}

    def _find(self) -> Iterator[Any]:
        seen: set[int] = set()
        for target in _find(self._glue, self._units, self._exposed()):
            seen.add(_key(target))
            yield target
        assert self._variables is not None
        for target in self._written:
            if _key(target) not in seen:
                seen.add(_key(target))
                yield target
        for value in self._variables.values_of_now():
            if isinstance(value, _CONTAINERS):
                yield from _visit(value, 1, seen)

    def touch(self, module: nn.Module, name: str) -> None:
        """Note the value of an attribute of ``module`` before code above the units sets or deletes it."""
        if self._in_turn:
            for held in (vars(module), module._modules):
                place = SwitchPlace(id(held), name)
                if place.key in self._touchable and place not in self._touched:
                    self._touched[place] = held.get(name, MISSING)

    @contextmanager
    def learning(self, step: Callable[..., Any]) -> Iterator[None]:
        """Context for a survey of ``step`` with one microbatch, which shows what becomes of plain values."""
        self.begin(step)
        self.enter(0)
        try:
            yield
            self.look()
            for place, before in self._seen.items():
                self._switches.learn(place, before)
        finally:
            self._in_turn, self._touched, self._seen = False, {}, {}

    def look(self) -> None:
        """Note changed plain values; called under :meth:`learning` wherever a microbatch could pause."""
        for place, before in self._plain_changes():
            self._seen.setdefault(place, before)

    def _plain_changes(self) -> Iterator[tuple[SwitchPlace, Any]]:
        """Places whose value has changed since the turn began, with the value before."""
        for place, before in self._touched.items():
            holder = self._holders.get(place.key)
            # A holder reports its own changes below, except for names that were set to the value they had.
            if holder is None or (isinstance(holder, _Names) and holder.is_unchanged(place.name)):
                yield place, before
        for key, holder in self._holders.items():
            if isinstance(holder, _Names):
                yield from ((SwitchPlace(key, name), before) for name, before in holder.plain)
        for key, setting in self._settings.items():
            yield from ((SwitchPlace(key, name), before) for name, before in setting.changed())

    def found(self) -> dict[SwitchPlace, Any]:
        """Comparable snapshot of all places.

        Keys are object ids, which differ between processes and may be reused, so places are numbered in the order in
        which they are found.
        """
        found: dict[SwitchPlace, Any] = {}
        for number, holder in enumerate(self._holders.values()):
            if isinstance(holder, _Names):
                found |= {SwitchPlace(number, name): frozen(value) for name, value in holder.target.items()}
            else:
                found[SwitchPlace(number, type(holder.target).__name__)] = frozen(list(holder.target))
        for number, key in enumerate(self._lasting, len(self._holders)):
            for place in self._switches.places:
                if place.key == key:
                    value = self._lasting[key].get(place.name, MISSING)
                    found[SwitchPlace(number, place.name)] = frozen(value)
        return found

    def with_keys(self, places: Iterable[SwitchPlace]) -> list[SwitchPlace]:
        """Places of :meth:`found`, with keys instead of numbers."""
        keys = [*self._holders, *self._lasting]
        return [place._replace(key=keys[place.key]) for place in places]

    def enter(self, microbatch: int) -> None:
        """Begin a turn of ``microbatch``: put back its own values."""
        own = self._own.get(microbatch)
        for position, holder in enumerate(self._holders.values()):
            holder.enter(own[position] if own else ())
        self._switches.enter(microbatch)
        self._in_turn = True

    def leave(self, microbatch: int) -> None:
        """End a turn of ``microbatch``: take out its own values."""
        self._in_turn = False
        # Before the holders restore anything: afterwards the changes of this turn are no longer visible. `switches`
        # leaves after the holders, so that it takes out only what they have left there.
        written, was_set = list(self._plain_changes()), self._touched
        self._touched = {}
        own = self._own[microbatch] = [holder.leave() for holder in self._holders.values()]
        names = zip(self._holders.items(), own, strict=True)
        dropped = [SwitchPlace(key, name) for (key, each), left in names if isinstance(each, _Names) for name in left]
        self._switches.leave(microbatch, written, dropped, was_set)
        self._buffer_writes.note(microbatch)

    def end_of(self, microbatch: int) -> None:
        """Settle the writes of ``microbatch``, which has ended; see
        :meth:`~smp_strategy.pipeline.switches.Switches.end`."""
        if self._switches.end(microbatch):
            for setting in self._settings.values():
                setting.begin()

    @contextmanager
    def at_barrier(self, microbatch: int) -> Iterator[None]:
        """See :meth:`~smp_strategy.pipeline.switches.Switches.at_barrier`."""
        with self._switches.at_barrier(microbatch):
            yield
        # Freezing or setting at a barrier (`toggle_optimizer`) holds for all, and is no change of the next microbatch.
        for setting in self._settings.values():
            setting.begin()

    def of_now(self) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`~smp_strategy.pipeline.switches.Switches.of_now`."""
        return self._switches.of_now(self._plain_changes()) if self._in_turn else nullcontext

    def end(self) -> None:
        """Put everything back, in the order of the microbatches, which have all ended."""
        self._switches.end_all()
        for position, holder in enumerate(self._holders.values()):
            found = [own[position] for _, own in sorted(self._own.items())]
            if any(found):
                holder.put_back(found)
        self._own = {}


class _Names:
    """Holder of named values: attributes, a dict, a variable of a closure."""

    def __init__(self, target: MutableMapping[Any, Any]) -> None:
        self.target = target
        self._shared: dict[Any, Any] = {}
        self._given: dict[Any, Any] = {}
        self._is_running: dict[Any, bool] = {}

    def enter(self, own: Any) -> None:
        self._shared = dict(stored(self.target))
        self._given = own or {}
        if own:
            set_items(self.target, own)

    @property
    def plain(self) -> list[tuple[Any, Any]]:
        """Names whose values have changed in this turn and contain no tensors, with the values before."""
        target, shared = stored(self.target), self._shared
        if len(target) == len(shared) and all(map(is_, target.values(), shared.values())):
            return []
        gone = [(name, before) for name, before in shared.items() if name not in target]
        new = [(name, value, shared.get(name, MISSING)) for name, value in target.items()]
        return gone + [(name, before) for name, value, before in new if value is not before and not _kind(value)]

    def is_unchanged(self, name: Any) -> bool:
        """Whether the name holds a plain value, the same as when the turn began."""
        value = stored(self.target).get(name, MISSING)
        return value is self._shared.get(name, MISSING) and name not in self._given and not _kind(value)

    def leave(self) -> dict[Any, Any]:
        """Take out the values of this turn, and return them; the table in [Note: private state]."""
        target, shared, given = stored(self.target), self._shared, self._given
        self._shared, self._given = {}, {}
        # The usual turn changes nothing. `is`, because `==` of tensors computes.
        if not given and len(target) == len(shared) and all(map(is_, target.values(), shared.values())):
            return {}
        own = {}
        for name, value in list(target.items()):
            before = shared.get(name, MISSING)
            # A name in `given` is the microbatch's own even if unchanged: `shared` was taken before it was put back.
            if (value is before and name not in given) or not (kind := _kind(value)):
                continue
            is_running = self._is_running.setdefault(name, isinstance(before, (Tensor, Number)))
            if is_running and kind == "real":
                continue
            own[name] = value
            # What came with the microbatch leaves with it. A new value that others may see (or must, to be refused)
            # stays until the next turn of another writer.
            if given.get(name, MISSING) is value or not (is_running or kind == "real"):
                self._restore(name, before)
        return own

    def _restore(self, name: Any, before: Any) -> None:
        if before is MISSING:
            delete_item(self.target, name)
        else:
            set_item(self.target, name, before)

    def put_back(self, found: list[Any]) -> None:
        """Merge the own values of all microbatches, in their order: the last one wins, lists are concatenated."""
        for name in dict.fromkeys(name for own in found for name in own):
            values = [own[name] for own in found if name in own]
            before = stored(self.target).get(name)
            if isinstance(before, list) and all(_continues(value, before) for value in values):
                # `self.losses = self.losses + [loss]`
                set_item(self.target, name, [*before, *(item for value in values for item in value[len(before) :])])
            else:
                set_item(self.target, name, values[-1])


class _Items:
    """Holder of items: a list, a deque or a set."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._shared: list[Any] = []

    def enter(self, own: Any) -> None:
        self._shared = list(self.target)
        if own:
            items = list(self.target)
            for index, item, replaces in own:
                if replaces and index < len(items):
                    items[index] = item
                else:
                    items.insert(index, item)
            self._fill(items)

    def leave(self) -> list[tuple[int, Any, bool]]:
        """Take out the items of this turn: their index, the item, and whether it replaces another."""
        shared, items = self._shared, list(self.target)
        self._shared = []
        if len(items) == len(shared) and all(map(is_, items, shared)):
            return []
        before = set(map(id, shared))
        new = [(index, item) for index, item in enumerate(items) if id(item) not in before and _kind(item)]
        if not new:
            return []
        mine = {index for index, _ in new}
        rest = [item for index, item in enumerate(items) if index not in mine]
        if len(items) == len(shared) and len(rest) < len(shared):
            # A preallocated list whose slots are filled one by one: the old items go back to their slots.
            self._fill([shared[index] if index in mine else item for index, item in enumerate(items)])
            return [(index, item, True) for index, item in new]
        self._fill(rest)
        return [(index, item, False) for index, item in new]

    def put_back(self, found: list[Any]) -> None:
        items = list(self.target)
        for own in found:
            for index, item, replaces in own:
                if replaces and index < len(items):
                    items[index] = item
                else:
                    items.append(item)
        self._fill(items)

    def _fill(self, items: list[Any]) -> None:
        refill(self.target, items)


def _key(target: Any) -> int:
    """Identity of a place; the same for all views of it."""
    return id(target.held_by if isinstance(target, (Variable, Chosen, ClassAttributes)) else target)


def _kind(value: Any, levels: int = MOST_LEVELS) -> str:
    """Kind of a value: ``placed`` (belongs to one microbatch), ``real`` (contains real tensors) or empty."""
    if isinstance(value, Tensor):
        return "placed" if isinstance(value, PlacedTensor) else "real"
    if not levels or isinstance(value, (str, Number, nn.Module, type)):
        return ""
    if isinstance(value, _CONTAINERS) and not value:
        return "placed"  # new in this turn, and about to be filled with tensors
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = stored(value).values()
    elif isinstance(value, (list, tuple, set, deque)):
        inside = value
    elif hasattr(value, "__dict__") and not callable(value):
        inside = vars(value).values()
    kinds = {_kind(item, levels - 1) for item in list(inside)[:MOST_ENTRIES]}
    # A new mutable container belongs to the microbatch whatever it holds: it will be changed. A tuple cannot be.
    is_new = not isinstance(value, tuple)
    return "placed" if "placed" in kinds or ("real" in kinds and is_new) else "real" if "real" in kinds else ""


def _continues(value: Any, before: list[Any]) -> bool:
    return isinstance(value, list) and len(value) >= len(before) and all(map(is_, value, before))


def _find(glue: Sequence[nn.Module], units: Sequence[nn.Module], exposed: Sequence[nn.Module] = ()) -> Iterator[Any]:
    """Containers that a step may put tensors into, each once."""
    seen: set[int] = set(map(id, (*glue, *units)))
    hooks = {module: [hook for name in _HOOKS for hook in vars(module)[name].values()] for module in (*glue, *units)}
    for module in (*glue, *exposed):
        yield from _visit(vars(module), 0, seen)
    for module in units:
        if hooks[module] and id(vars(module)) not in seen:
            seen.add(id(vars(module)))
            yield vars(module)
    for _, container in collectors():
        yield from _visit(container, 1, seen)
    for of_module in hooks.values():
        for hook in of_module:
            yield from _visit_function(hook, seen)


def reached_by_hooks(modules: Sequence[nn.Module]) -> list[Any]:
    """Lists, dicts and variables that hooks on ``modules`` reach, except attributes of modules."""
    modules = list(dict.fromkeys(modules))
    seen = {id(vars(module)) for module in modules}
    found: list[Any] = []
    for module in modules:
        for hook in [hook for name in _HOOKS for hook in vars(module)[name].values()]:
            found += _visit_function(hook, seen)
    return found


def _visit(value: Any, level: int, seen: set[int]) -> Iterator[Any]:
    if level > MOST_LEVELS or id(value) in seen or isinstance(value, (Tensor, nn.Module, type, types.ModuleType)):
        return
    if isinstance(value, (*_CONTAINERS, Variable)):
        seen.add(id(value))
        if len(value) > MOST_ENTRIES:
            return
        yield value
        inside = (
            [(None, item) for item in value] if isinstance(value, (list, set, deque)) else list(stored(value).items())
        )
        for name, item in inside:
            if not (level == 0 and name in _OF_EVERY_MODULE):
                yield from _visit(item, level + 1, seen)
    elif level == 1 and hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Iterator):
        seen.add(id(value))
        yield from _visit(vars(value), level, seen)


def _visit_function(function: Any, seen: set[int]) -> Iterator[Any]:
    """Containers that a hook can reach: variables around it, arguments bound to it, the object whose method it is."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        for value in (*function.args, *function.keywords.values()):
            yield from _visit(value, 1, seen)
        yield from _visit_function(function.func, seen)
    elif isinstance(function, types.MethodType):
        owner = function.__self__
        if id(owner) not in seen:
            yield from _visit(vars(owner) if isinstance(owner, nn.Module) else owner, 1, seen)
        yield from _visit_function(function.__func__, seen)
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            variable = Variable(cell)
            if id(cell) not in seen:
                seen.add(id(cell))
                yield from _visit(variable, 0, seen)
            if variable and callable(cell.cell_contents):
                yield from _visit_function(cell.cell_contents, seen)
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
        for value in values:
            yield from _visit(value, 1, seen)
    elif hasattr(function, "__dict__"):
        yield from _visit(vars(function), 1, seen)
