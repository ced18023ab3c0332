"""What a microbatch leaves in objects that all microbatches share, kept apart while they take turns.

The user's code is written for one pass at a time: ``self.features = h`` in ``forward``, a hook that fills a dict or a
list, a loss that reads it at the end. Microbatches that interleave would find each other's tensors there. So when a
microbatch pauses, the tensors that it has put into attributes of the glue, into dicts, lists, sets and objects in
these attributes and in context variables, and into variables and arguments of hooks, are taken out, and put back when
it goes on. After the step they are all back, as if one microbatch had run after the other: a list has what each has
appended, an attribute what the last one wrote.

What must not be private stays shared: everything without tensors (a counter counts), and tensors that take the place
of a tensor or number (running statistics). A running sum of *placed* tensors would tie microbatches together: it is
refused, by a dry run of two microbatches (:mod:`smp_strategy.dry_run`) or where one finds a tensor of another.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from numbers import Number
from operator import is_
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.pipeline.placed import PlacedTensor
from smp_strategy.trace.collectors import collectors

__all__ = ["PrivateState", "reached_by_hooks"]

# Larger containers (vocabularies, histories of an epoch) are not looked into: it would cost more than it is worth.
MOST_ENTRIES = 1000
# How deep containers may stand in each other, counted from an attribute.
MOST_LEVELS = 2

_MISSING = object()
_CONTAINERS = (dict, list, set, deque)
# Attributes of every module that hold no values of a step.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@final
class PrivateState:
    """Keeps the microbatches of each step apart. One object lasts for all steps.

    Args:
        glue: modules above the units.
        units: modules whose own attributes count only where hooks may set them.
        exposed: gives modules inside of units whose attributes code above the units reads.
    """

    def __init__(
        self,
        glue: Sequence[nn.Module],
        units: Sequence[nn.Module],
        exposed: Callable[[], Sequence[nn.Module]] = lambda: (),
    ) -> None:
        self._glue = glue
        self._units = units
        self._exposed = exposed
        self._holders: dict[int, _Names | _Items] = {}
        self._own: dict[int, list[Any]] = {}

    def begin(self) -> None:
        """Look for places where tensors may be put; call it before the microbatches of a step take turns."""
        known = self._holders
        self._own = {}
        self._holders = {}
        for target in _find(self._glue, self._units, self._exposed()):
            # What is known about a place lasts: the first value tells whether it is a running one.
            kind = _Items if isinstance(target, (list, set, deque)) else _Names
            key = id(target.cell if isinstance(target, _Variable) else target)
            self._holders[key] = known.get(key) or kind(target)

    def enter(self, microbatch: int) -> None:
        """A turn of ``microbatch`` begins."""
        own = self._own.get(microbatch)
        for position, holder in enumerate(self._holders.values()):
            holder.enter(own[position] if own else ())

    def leave(self, microbatch: int) -> None:
        """It ends."""
        self._own[microbatch] = [holder.leave() for holder in self._holders.values()]

    def end(self) -> None:
        """All microbatches are through: put everything back, in their order."""
        for position, holder in enumerate(self._holders.values()):
            found = [own[position] for _, own in sorted(self._own.items())]
            if any(found):
                holder.put_back(found)
        self._own = {}


class _Names:
    """A place where values stand under names: attributes, a dict, a variable of a closure."""

    def __init__(self, target: MutableMapping[Any, Any]) -> None:
        self._target = target
        self._shared: dict[Any, Any] = {}
        self._given: dict[Any, Any] = {}
        self._is_running: dict[Any, bool] = {}

    def enter(self, own: Any) -> None:
        self._shared = dict(self._target)
        self._given = own or {}
        if own:
            self._target.update(own)

    def leave(self) -> dict[Any, Any]:
        target, shared, given = self._target, self._shared, self._given
        self._shared, self._given = {}, {}
        if not given and len(target) == len(shared) and all(map(is_, target.values(), shared.values())):
            return {}
        own = {}
        for name, value in list(target.items()):
            before = shared.get(name, _MISSING)
            if (value is before and name not in given) or not (kind := _kind(value)):
                continue
            is_running = self._is_running.setdefault(name, isinstance(before, (Tensor, Number)))
            if is_running and kind == "real":
                continue
            own[name] = value
            if given.get(name, _MISSING) is value or not (is_running or kind == "real"):
                self._restore(name, before)
        return own

    def _restore(self, name: Any, before: Any) -> None:
        if before is _MISSING:
            del self._target[name]
        else:
            self._target[name] = before

    def put_back(self, found: list[Any]) -> None:
        for name in dict.fromkeys(name for own in found for name in own):
            values = [own[name] for own in found if name in own]
            before = self._target.get(name)
            if isinstance(before, list) and all(_continues(value, before) for value in values):
                # `self.losses = self.losses + [loss]`
                self._target[name] = [*before, *(item for value in values for item in value[len(before) :])]
            else:
                self._target[name] = values[-1]


class _Items:
    """A list, a deque or a set."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._shared: list[Any] = []

    def enter(self, own: Any) -> None:
        self._shared = list(self._target)
        if own:
            items = list(self._target)
            for index, item, replaces in own:
                if replaces and index < len(items):
                    items[index] = item
                else:
                    items.insert(index, item)
            self._fill(items)

    def leave(self) -> list[tuple[int, Any, bool]]:
        shared, items = self._shared, list(self._target)
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
        items = list(self._target)
        for own in found:
            for index, item, replaces in own:
                if replaces and index < len(items):
                    items[index] = item
                else:
                    items.append(item)
        self._fill(items)

    def _fill(self, items: list[Any]) -> None:
        self._target.clear()
        if isinstance(self._target, set):
            self._target.update(items)
        else:
            self._target.extend(items)


class _Variable(MutableMapping[str, Any]):
    """A variable of a closure, as a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __iter__(self) -> Iterator[str]:
        try:
            _ = self.cell.cell_contents
        except ValueError:  # not assigned yet
            return
        yield "contents"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cell.cell_contents


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
    if isinstance(value, (*_CONTAINERS, _Variable)):
        seen.add(id(value))
        if len(value) > MOST_ENTRIES:
            return
        yield value
        inside = [(None, item) for item in value] if isinstance(value, (list, set, deque)) else list(value.items())
        for name, item in inside:
            if not (level == 0 and name in _OF_EVERY_MODULE):
                yield from _visit(item, level + 1, seen)
    elif level == 1 and hasattr(value, "__dict__") and not callable(value):
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
            variable = _Variable(cell)
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
