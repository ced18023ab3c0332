"""Global and closure variables that user code names: found by its bytecode, restored after a dry run.

Examples are a list at the top of a script and a count in a notebook. A dry run restores them; interleaved microbatches
are kept apart (:mod:`smp_strategy.pipeline.microbatch_state`). The search starts at the functions of the modules'
classes and at the step, and follows the functions and classes that these name. It finds global variables, those of
enclosing functions, attributes of the classes, and the lists, dicts and sets in all of them. Libraries are skipped:
their caches and registries are not the user's.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

from torch import nn

from smp_strategy.model.trace.snapshot import Snapshot, containers_in
from smp_strategy.model.trace.undo_iterators import iterators_rewound
from smp_strategy.model.trace.user_code import is_of_library, is_ours, is_own_object

__all__ = ["Chosen", "ClassAttributes", "Variable", "Variables", "variables_of", "variables_restored"]

_MISSING = object()
_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_CELL = ("STORE_DEREF", "DELETE_DEREF")
_ATTRIBUTE = ("STORE_ATTR", "DELETE_ATTR")
_WRITES = frozenset({*_GLOBAL, *_CELL, *_ATTRIBUTE})


@contextmanager
def variables_restored(modules: Iterable[nn.Module], step: Callable[..., Any] | None = None) -> Iterator[None]:
    """Restore afterwards the variables that code of ``modules`` and ``step`` names."""
    found = variables_of(modules, step)
    containers = [*containers_in(found.values()), *found.holders(), *found.written()]
    snapshot = Snapshot(objects=found.values(), containers=containers)
    with iterators_rewound(found.holders()), snapshot:
        yield


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
        self._of_modules: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._of_functions: dict[int, tuple[CellType, Any]] = {}
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
                    self.look_at(_contents(cell))
            return
        self._codes += [(function, code) for code in _codes(function.__code__)]
        for cell in function.__closure__ or ():
            inside = _contents(cell)
            self._of_functions[id(cell)] = (cell, inside)
            self.look_at(inside)
        for name in _names(function.__code__):
            held = function.__globals__.get(name, _MISSING)
            self._of_modules[id(function.__globals__), name] = (function.__globals__, held)
            self.look_at(held)

    def values(self) -> list[Any]:
        """Values at discovery."""
        held = [value for _, value in (*self._of_modules.values(), *self._of_functions.values())]
        return [*held, *self._of_classes]

    def holders(self) -> list[MutableMapping[str, Any]]:
        """Namespaces and cells that hold them, as mappings."""
        named: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for (key, name), (variables, _) in self._of_modules.items():
            named.setdefault(key, (variables, []))[1].append(name)
        # A cell that is empty yet is left out: the enclosing function will assign it, and that must not be undone.
        cells = [Variable(cell) for cell, held in self._of_functions.values() if held is not _MISSING]
        return [*(Chosen(*each) for each in named.values()), *cells]

    def values_of_now(self) -> list[Any]:
        """Present values."""
        held = [variables.get(name) for (_, name), (variables, _) in self._of_modules.items()]
        return [*held, *(_contents(cell) for cell, _ in self._of_functions.values()), *self._of_classes]

    def written(self) -> list[MutableMapping[Any, Any]]:
        """Variables that the code itself writes to, as mappings.

        These are global variables, those of enclosing functions, and attributes of classes, modules and objects that it
        names.
        """
        names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        cells: dict[int, CellType] = {}
        attributes = set[str]()
        for function, code in self._codes:
            around = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            for operation, name in _writes_of(code):
                if operation in _GLOBAL:
                    names.setdefault(id(function.__globals__), (function.__globals__, set()))[1].add(name)
                elif operation in _ATTRIBUTE:
                    attributes.add(name)
                elif name in around:
                    cells[id(around[name])] = around[name]
        found: list[MutableMapping[Any, Any]] = [Chosen(*each) for each in names.values()]
        found += map(Variable, cells.values())
        for owner in self._owners():
            mine = attributes & vars(owner).keys()
            if mine:
                found.append(ClassAttributes(owner, mine) if isinstance(owner, type) else Chosen(vars(owner), mine))
        return found

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


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


@final
class Variable(MutableMapping[str, Any]):
    """Mapping view of a closure variable; empty while the variable is unassigned."""

    def __init__(self, cell: CellType) -> None:
        self.held_by = cell

    def __iter__(self) -> Iterator[str]:
        if _contents(self.held_by) is not _MISSING:  # otherwise it is not assigned yet
            yield "contents"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        value = _contents(self.held_by)
        if value is _MISSING:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.held_by.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.held_by.cell_contents


@final
class Chosen(MutableMapping[str, Any]):
    """Mapping view of some names of a namespace."""

    def __init__(self, held_by: dict[str, Any], names: Iterable[str]) -> None:
        self.held_by = held_by
        self._names = tuple(sorted(names))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self.held_by)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self.held_by[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.held_by[name] = value

    def __delitem__(self, name: str) -> None:
        del self.held_by[name]


@final
class ClassAttributes(MutableMapping[str, Any]):
    """Mapping view of some attributes of a class; writes go through ``setattr``."""

    def __init__(self, held_by: type, names: Iterable[str]) -> None:
        self.held_by = held_by
        self._names = tuple(sorted(names))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in vars(self.held_by))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return vars(self.held_by)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.held_by, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.held_by, name)
