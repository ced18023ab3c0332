"""What a microbatch leaves in objects that all microbatches share, kept apart while they take turns.

The user's code is written for one pass at a time: ``self.features = h`` in ``forward``, a hook that fills a dict or a
list, a loss that reads it at the end. Microbatches that interleave would find each other's tensors there. So when a
microbatch pauses, the tensors that it has put into attributes of the glue, into dicts, lists, sets and objects in
these attributes and in context variables, and into variables and arguments of hooks, are taken out, and put back when
it goes on. After the step they are all back, as if one microbatch had run after the other: a list has what each has
appended, an attribute what the last one wrote.

What must not be private stays shared: tensors that take the place of a tensor or number (running statistics), and what
lists without tensors hold. A running sum of *placed* tensors would tie microbatches together: it is refused, by a dry
run of two microbatches (:mod:`smp_strategy.engine.dry_run`) or where one finds a tensor of another.

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

from smp_strategy.model.trace.context_containers import collectors
from smp_strategy.model.trace.undo_variables import Chosen, ClassAttributes, Variable, Variables, variables_of
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.rehearsal import frozen
from smp_strategy.pipeline.switches import MISSING, Switches, SwitchPlace
from smp_strategy.pipeline.torch_switches import Frozen, TorchSettings
from smp_strategy.pipeline.writes import BufferWrites

__all__ = ["MicrobatchState", "reached_by_hooks"]

# Larger containers (vocabularies, histories of an epoch) are not looked into: it would cost more than it is worth.
MOST_ENTRIES = 1000
# How deep containers may stand in each other, counted from an attribute.
MOST_LEVELS = 2

_CONTAINERS = (dict, list, set, deque)
# Attributes of every module that hold no values of a step.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@final
class MicrobatchState:
    """Keeps the microbatches of each step apart. One object lasts for all steps.

    Args:
        glue: modules above the units.
        units: modules whose own attributes count only where hooks may set them.
        exposed: gives modules inside of units whose attributes code above the units reads.
        switches: what is known of places with plain values, by surveys.
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
        # Attributes of modules, inside of units mostly, that this turn has written to, and what it had found there.
        self._touched: dict[SwitchPlace, Any] = {}
        self._touchable: dict[int, Any] = {}
        self._lasting: dict[int, Any] = {}
        self._seen: dict[SwitchPlace, Any] = {}
        self._in_turn = False

    def begin(self, step: Callable[..., Any] | None = None) -> None:
        """Look for places where something may be put; call it before the microbatches of a step take turns.

        Args:
            step: what they run, whose code may name variables.
        """
        if self._variables is None:
            self._look_around(step)
        known = self._holders
        self._own = {}
        self._holders = {}
        for target in self._find():
            # What is known about a place lasts: the first value tells whether it is a running one.
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
        """Code above the units is about to set or delete an attribute of ``module``."""
        if self._in_turn:
            for held in (vars(module), module._modules):
                place = SwitchPlace(id(held), name)
                if place.key in self._touchable and place not in self._touched:
                    self._touched[place] = held.get(name, MISSING)

    @contextmanager
    def learning(self, step: Callable[..., Any]) -> Iterator[None]:
        """In here ``step`` is run to look at it, with one microbatch, which shows what becomes of plain values."""
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
        """Called under :meth:`learning` wherever a microbatch could pause."""
        for place, before in self._plain_changes():
            self._seen.setdefault(place, before)

    def _plain_changes(self) -> Iterator[tuple[SwitchPlace, Any]]:
        """Where there is something else than when the turn began, and what was there then."""
        for place, before in self._touched.items():
            holder = self._holders.get(place.key)
            # Others tell of themselves; but not of what was set to what it was.
            if holder is None or (isinstance(holder, _Names) and holder.is_unchanged(place.name)):
                yield place, before
        for key, holder in self._holders.items():
            if isinstance(holder, _Names):
                yield from ((SwitchPlace(key, name), before) for name, before in holder.plain)
        for key, setting in self._settings.items():
            yield from ((SwitchPlace(key, name), before) for name, before in setting.changed())

    def found(self) -> dict[SwitchPlace, Any]:
        """What is in all places now, to be compared. In the place of keys, which are of this process, and may come to
        mean others, stand numbers in the order in which places are found."""
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
        """Places that :meth:`found` has told, with their keys."""
        keys = [*self._holders, *self._lasting]
        return [place._replace(key=keys[place.key]) for place in places]

    def enter(self, microbatch: int) -> None:
        """A turn of ``microbatch`` begins."""
        own = self._own.get(microbatch)
        for position, holder in enumerate(self._holders.values()):
            holder.enter(own[position] if own else ())
        self._switches.enter(microbatch)
        self._in_turn = True

    def leave(self, microbatch: int) -> None:
        """It ends."""
        self._in_turn = False
        written, was_set = list(self._plain_changes()), self._touched
        self._touched = {}
        own = self._own[microbatch] = [holder.leave() for holder in self._holders.values()]
        names = zip(self._holders.items(), own, strict=True)
        dropped = [SwitchPlace(key, name) for (key, each), left in names if isinstance(each, _Names) for name in left]
        self._switches.leave(microbatch, written, dropped, was_set)
        self._buffer_writes.note(microbatch)

    def end_of(self, microbatch: int) -> None:
        """All of ``microbatch`` has run; see :meth:`~smp_strategy.pipeline.switches.Switches.end`."""
        if self._switches.end(microbatch):
            for setting in self._settings.values():
                setting.begin()

    @contextmanager
    def at_barrier(self, microbatch: int) -> Iterator[None]:
        """See :meth:`~smp_strategy.pipeline.switches.Switches.at_barrier`."""
        with self._switches.at_barrier(microbatch):
            yield
        # What is frozen or set there (`toggle_optimizer`) is for all, and no change of the next microbatch.
        for setting in self._settings.values():
            setting.begin()

    def of_now(self) -> Callable[[], AbstractContextManager[None]]:
        """See :meth:`~smp_strategy.pipeline.switches.Switches.of_now`."""
        return self._switches.of_now(self._plain_changes()) if self._in_turn else nullcontext

    def end(self) -> None:
        """All microbatches are through: put everything back, in their order."""
        self._switches.end_all()
        for position, holder in enumerate(self._holders.values()):
            found = [own[position] for _, own in sorted(self._own.items())]
            if any(found):
                holder.put_back(found)
        self._own = {}


class _Names:
    """A place where values stand under names: attributes, a dict, a variable of a closure."""

    def __init__(self, target: MutableMapping[Any, Any]) -> None:
        self.target = target
        self._shared: dict[Any, Any] = {}
        self._given: dict[Any, Any] = {}
        self._is_running: dict[Any, bool] = {}

    def enter(self, own: Any) -> None:
        self._shared = dict(self.target)
        self._given = own or {}
        if own:
            self.target.update(own)

    @property
    def plain(self) -> list[tuple[Any, Any]]:
        """Names whose values have changed since the turn began and are none of tensors, and what was there before."""
        target, shared = self.target, self._shared
        if len(target) == len(shared) and all(map(is_, target.values(), shared.values())):
            return []
        gone = [(name, before) for name, before in shared.items() if name not in target]
        new = [(name, value, shared.get(name, MISSING)) for name, value in target.items()]
        return gone + [(name, before) for name, value, before in new if value is not before and not _kind(value)]

    def is_unchanged(self, name: Any) -> bool:
        """Whether there is a plain value, the same as when the turn began."""
        value = self.target.get(name, MISSING)
        return value is self._shared.get(name, MISSING) and name not in self._given and not _kind(value)

    def leave(self) -> dict[Any, Any]:
        target, shared, given = self.target, self._shared, self._given
        self._shared, self._given = {}, {}
        if not given and len(target) == len(shared) and all(map(is_, target.values(), shared.values())):
            return {}
        own = {}
        for name, value in list(target.items()):
            before = shared.get(name, MISSING)
            if (value is before and name not in given) or not (kind := _kind(value)):
                continue
            is_running = self._is_running.setdefault(name, isinstance(before, (Tensor, Number)))
            if is_running and kind == "real":
                continue
            own[name] = value
            if given.get(name, MISSING) is value or not (is_running or kind == "real"):
                self._restore(name, before)
        return own

    def _restore(self, name: Any, before: Any) -> None:
        if before is MISSING:
            del self.target[name]
        else:
            self.target[name] = before

    def put_back(self, found: list[Any]) -> None:
        for name in dict.fromkeys(name for own in found for name in own):
            values = [own[name] for own in found if name in own]
            before = self.target.get(name)
            if isinstance(before, list) and all(_continues(value, before) for value in values):
                # `self.losses = self.losses + [loss]`
                self.target[name] = [*before, *(item for value in values for item in value[len(before) :])]
            else:
                self.target[name] = values[-1]


class _Items:
    """A list, a deque or a set."""

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
            # Places of a list that is as long as needed from the start, filled one by one.
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
        self.target.clear()
        if isinstance(self.target, set):
            self.target.update(items)
        else:
            self.target.extend(items)


def _key(target: Any) -> int:
    """What a place is known by, however it is seen."""
    return id(target.held_by if isinstance(target, (Variable, Chosen, ClassAttributes)) else target)


def _kind(value: Any, levels: int = MOST_LEVELS) -> str:
    """``placed``: belongs to one microbatch; ``real``: a tensor that it may have replaced; else empty."""
    if isinstance(value, Tensor):
        return "placed" if isinstance(value, PlacedTensor) else "real"
    if not levels or isinstance(value, (str, Number, nn.Module, type)):
        return ""
    if isinstance(value, _CONTAINERS) and not value:
        return "placed"  # a new one, to be filled
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple, set, deque)):
        inside = value
    elif hasattr(value, "__dict__") and not callable(value):
        inside = vars(value).values()
    kinds = {_kind(item, levels - 1) for item in list(inside)[:MOST_ENTRIES]}
    is_new = not isinstance(value, tuple)
    return "placed" if "placed" in kinds or ("real" in kinds and is_new) else "real" if "real" in kinds else ""


def _continues(value: Any, before: list[Any]) -> bool:
    return isinstance(value, list) and len(value) >= len(before) and all(map(is_, value, before))


def _find(glue: Sequence[nn.Module], units: Sequence[nn.Module], exposed: Sequence[nn.Module] = ()) -> Iterator[Any]:
    """Dicts, lists and the like where a step may put tensors, each once."""
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
    """Lists, dicts and variables that hooks on ``modules`` reach and that are no attributes of modules."""
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
        inside = [(None, item) for item in value] if isinstance(value, (list, set, deque)) else list(value.items())
        for name, item in inside:
            if not (level == 0 and name in _OF_EVERY_MODULE):
                yield from _visit(item, level + 1, seen)
    elif level == 1 and hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Iterator):
        seen.add(id(value))
        yield from _visit(vars(value), level, seen)


def _visit_function(function: Any, seen: set[int]) -> Iterator[Any]:
    """What a hook can reach: variables around it, arguments bound to it, the object whose method it is."""
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
