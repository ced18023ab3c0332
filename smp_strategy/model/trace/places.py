"""Places: where the user's code may write to, found for surveys and for microbatches that take turns.

They are attributes of modules, containers and objects in these, what hooks reach, context variables that hold
containers, and *variables*: the global variables and those of enclosing functions that the code of the modules and of
the step names, and attributes of classes, modules and objects that it names. Variables are found in the bytecode, from
the functions of the modules' classes and the step on through the functions and classes that these name. Libraries are
skipped: their caches and registries are not the user's.

A place is a mapping, a list, a deque or a set. Variables are in mappings, too (:class:`Names`).
"""

import dis
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.model.trace.pytree import nodes
from smp_strategy.model.trace.side_effects import collectors
from smp_strategy.model.trace.snapshot import Snapshot, containers_in, stored
from smp_strategy.model.trace.user_code import is_of_library, is_ours, is_own_object

__all__ = ["MOST_ENTRIES", "Names", "Variables", "places_of_step", "reached_by_hooks", "variables_of"]

# Larger containers (vocabularies, histories of an epoch) are not looked into: it would cost more than it is worth.
MOST_ENTRIES = 1000

_CONTAINERS = (dict, list, set, deque)
# Attributes of every module that hold no values of a step.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_MISSING = object()
_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_CELL = ("STORE_DEREF", "DELETE_DEREF")
_ATTRIBUTE = ("STORE_ATTR", "DELETE_ATTR")
_WRITES = frozenset({*_GLOBAL, *_CELL, *_ATTRIBUTE})


def places_of_step(
    glue: Sequence[nn.Module], units: Sequence[nn.Module], exposed: Sequence[nn.Module], variables: "Variables"
) -> dict[int, Any]:
    """Places that a step may write to, by keys that identify them.

    Args:
        glue: Modules above the units.
        units: Units; their own attributes count only if hooks may set them.
        exposed: Modules inside of units whose attributes code above the units reads.
        variables: Variables that the code names.
    """
    modules = (*glue, *units)
    places, seen = dict[int, Any](), dict[int, Any](zip(map(id, modules), modules, strict=True))
    for attributes in (vars(module) for module in (*glue, *exposed) if len(vars(module)) <= MOST_ENTRIES):
        seen[id(attributes)] = places[id(attributes)] = attributes
        for value in [value for name, value in attributes.items() if name not in _OF_EVERY_MODULE]:
            _visit(value, seen, places)
    hooks = {module: _hooks_of(module) for module in modules}
    places |= {id(vars(module)): vars(module) for module in units if hooks[module] and id(vars(module)) not in seen}
    seen |= places
    for _, container in collectors():
        _visit(container, seen, places)
    for hook in (each for of_module in hooks.values() for each in of_module):
        _visit_function(hook, seen, places)
    for names in variables.written:
        places.setdefault(id(names.held_by), names)
    seen |= places
    for value in variables.values_of_now():
        if isinstance(value, _CONTAINERS):
            _visit(value, seen, places)
    return places


def reached_by_hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """Lists, dicts and variables that hooks on ``modules`` reach, except attributes of modules."""
    modules = list(dict.fromkeys(modules))
    places, seen = dict[int, Any](), {id(vars(module)): vars(module) for module in modules}
    for module in modules:
        for hook in _hooks_of(module):
            _visit_function(hook, seen, places)
    return list(places.values())


def _hooks_of(module: nn.Module) -> list[Any]:
    return [hook for name in _HOOKS for hook in vars(module)[name].values()]


def _visit(value: Any, seen: dict[int, Any], places: dict[int, Any]) -> None:
    """Add ``value``, if it is a container or an object that holds some, and the containers in it."""
    if isinstance(value, (Tensor, nn.Module, type, ModuleType)):
        return
    is_container = isinstance(value, _CONTAINERS)
    if not is_container and (not hasattr(value, "__dict__") or callable(value) or isinstance(value, Iterator)):
        return
    for _, item in nodes(value if is_container else vars(value), _containers_in, levels=1, once=seen):
        if len(item) <= MOST_ENTRIES:
            places[id(item)] = item


def _containers_in(container: Any) -> Iterable[tuple[None, Any]]:
    if len(container) > MOST_ENTRIES:
        return ()
    inside = list(stored(container).values()) if isinstance(container, dict) else container
    return [(None, each) for each in inside if isinstance(each, _CONTAINERS)]


def _visit_function(function: Any, seen: dict[int, Any], places: dict[int, Any]) -> None:
    """Add what a hook can reach: variables around it, arguments bound to it, the object whose method it is."""
    if id(function) in seen:
        return
    seen[id(function)] = function
    values: list[Any] = []
    if isinstance(function, functools.partial):
        values = [*function.args, *function.keywords.values()]
        _visit_function(function.func, seen, places)
    elif isinstance(function, MethodType):
        owner = function.__self__
        if id(owner) not in seen:
            values = [vars(owner) if isinstance(owner, nn.Module) else owner]
        _visit_function(function.__func__, seen, places)
    elif isinstance(function, FunctionType):
        for name, cell in _cells_of(function):
            seen[id(cell)] = cell
            places.setdefault(id(cell), Names(cell, [name]))
            content = _value_in(cell, name)
            _visit(content, seen, places)
            if callable(content):
                _visit_function(content, seen, places)
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
    elif hasattr(function, "__dict__"):
        values = [vars(function)]
    for value in values:
        _visit(value, seen, places)


def variables_of(modules: Iterable[nn.Module], step: Callable[..., Any] | None = None) -> "Variables":
    """Find the variables that code of ``modules`` and ``step`` names."""
    found, modules = Variables(), list(modules)
    for kind in {each for module in modules for each in type(module).__mro__}:
        found.look_at_class(kind)
    for value in (each for module in modules for each in vars(module).values()):
        if isinstance(value, (FunctionType, MethodType)):
            found.look_at(value)
    if step is not None:
        found.look_at(step)
    return found


@final
class Variables:
    """Variables, by the namespaces and cells that hold them, with their values at discovery."""

    def __init__(self) -> None:
        # Namespace or cell, name, and value of each.
        self._found: dict[tuple[int, str], tuple[dict[str, Any] | CellType, str, Any]] = {}
        self._of_classes: list[Any] = []
        self._classes: list[type] = []
        self._codes: list[tuple[FunctionType, CodeType]] = []
        self._seen = set[int]()

    def look_at_class(self, kind: type) -> None:
        """Add the attributes of a class, and everything that its functions name."""
        if id(kind) in self._seen or is_of_library(kind):
            return
        self._seen.add(id(kind))
        for value in vars(kind).values():
            self.look_at(value.fget if isinstance(value, property) else value)
        self._of_classes += vars(kind).values()
        self._classes.append(kind)

    def look_at(self, value: Any) -> None:
        """Add everything that ``value`` names, if it is a function or a class."""
        function = _function_of(value)
        if function is None and isinstance(value, type):  # it may be a context manager
            self.look_at_class(value)
        if function is None or id(function) in self._seen:
            return
        self._seen.add(id(function))
        if is_of_library(function):
            if is_ours(function):  # a wrapper around a function of the user
                for cell in function.__closure__ or ():
                    self.look_at(_value_in(cell, ""))
            return
        self._codes += [(function, code) for code in _codes(function.__code__)]
        for name, cell in _cells_of(function):
            self._add(cell, name)
        for name in _names(function.__code__):
            self._add(function.__globals__, name)

    def _add(self, holder: dict[str, Any] | CellType, name: str) -> None:
        value = _value_in(holder, name)
        self._found[id(holder), name] = (holder, name, value)
        self.look_at(value)

    def values(self) -> list[Any]:
        return [*(value for _, _, value in self._found.values()), *self._of_classes]

    def holders(self) -> "list[Names]":
        """Namespaces and cells that hold them, as mappings."""
        named: dict[int, tuple[Any, list[str]]] = {}
        for holder, name, value in self._found.values():
            # A cell that is empty yet is left out: the enclosing function will assign it, which must not be undone.
            if value is not _MISSING or isinstance(holder, dict):
                named.setdefault(id(holder), (holder, []))[1].append(name)
        return [Names(*each) for each in named.values()]

    def snapshot(self) -> Snapshot:
        """Snapshot of the variables and what they hold."""
        containers = [*containers_in(self.values()), *self.holders(), *self.written]
        return Snapshot(objects=self.values(), containers=containers)

    def values_of_now(self) -> list[Any]:
        return [*(_value_in(holder, name) for holder, name, _ in self._found.values()), *self._of_classes]

    @functools.cached_property
    def written(self) -> "list[Names]":
        """Variables that the code itself writes to.

        These are global variables, those of enclosing functions, and attributes of classes, modules and objects that it
        names.
        """
        names: dict[int, tuple[Any, set[str]]] = {}
        attributes = set[str]()
        for function, code in self._codes:
            around = dict(_cells_of(function))
            for operation, name in _writes_of(code):
                if operation in _ATTRIBUTE:
                    attributes.add(name)
                    continue
                holder: Any = function.__globals__ if operation in _GLOBAL else around.get(name)
                if holder is not None:
                    names.setdefault(id(holder), (holder, set()))[1].add(name)
        for owner in self._owners():
            if mine := attributes & vars(owner).keys():
                holder = owner if isinstance(owner, type) else vars(owner)
                names.setdefault(id(holder), (holder, set()))[1].update(mine)
        return [Names(*each) for each in names.values()]

    def _owners(self) -> list[Any]:
        """Classes, modules and objects of the user that the code names."""
        owners: dict[int, Any] = {id(kind): kind for kind in self._classes}
        for value in self.values():
            is_named = isinstance(value, (type, ModuleType))
            if not is_of_library(value) if is_named else is_own_object(value):
                owners[id(value)] = value
        return list(owners.values())


def _function_of(value: Any) -> FunctionType | None:
    """The function behind a method, a partial or a wrapper."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    return value if isinstance(value, FunctionType) else None


def _codes(code: CodeType) -> list[CodeType]:
    """``code`` and that of nested functions."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [code, *(each for one in inner for each in _codes(one))]


@functools.lru_cache(maxsize=4096)
def _writes_of(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Instructions of ``code`` that write to variables of others, and the names of these."""
    found = [(each.opname, each.argval) for each in dis.get_instructions(code) if each.opname in _WRITES]
    return tuple(dict.fromkeys(found))


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes that ``code`` and its nested functions look up."""
    return {name for each in _codes(code) for name in each.co_names}


def _cells_of(function: FunctionType) -> Iterable[tuple[str, CellType]]:
    """Variables of enclosing functions, by name."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _value_in(holder: dict[str, Any] | type | CellType, name: str) -> Any:
    if not isinstance(holder, CellType):
        return (holder if isinstance(holder, dict) else vars(holder)).get(name, _MISSING)
    try:
        return holder.cell_contents
    except ValueError:  # it is empty
        return _MISSING


@final
class Names(MutableMapping[str, Any]):
    """Some names of a namespace or a class; or a variable of an enclosing function, which is empty until assigned."""

    def __init__(self, held_by: dict[str, Any] | type | CellType, names: Iterable[str]) -> None:
        self.held_by = held_by
        self._names = tuple(sorted(names))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if _value_in(self.held_by, name) is not _MISSING)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        value = _value_in(self.held_by, name)
        if value is _MISSING:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self.held_by, dict):
            self.held_by[name] = value
        else:
            setattr(self.held_by, "cell_contents" if isinstance(self.held_by, CellType) else name, value)

    def __delitem__(self, name: str) -> None:
        if isinstance(self.held_by, dict):
            del self.held_by[name]
        else:
            delattr(self.held_by, "cell_contents" if isinstance(self.held_by, CellType) else name)
