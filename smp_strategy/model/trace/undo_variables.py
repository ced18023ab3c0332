"""Global and closure variables that user code names: found by its bytecode, restored after a dry run.

Examples are a list at the top of a script and a count in a notebook. A dry run restores them; interleaved microbatches
are kept apart (:mod:`smp_strategy.pipeline.microbatch_state`). The search starts at the functions of the modules'
classes and at the step, and follows the functions and classes that these name. It finds global variables, those of
enclosing functions, attributes of the classes, and the lists, dicts and sets in all of them. Libraries are skipped:
their caches and registries are not the user's.

Rewind iterators in attributes and variables after a dry run.

``next(self.batches)`` cannot be undone. So during a dry run a :class:`Rewindable` replaces the iterator and records its
items. Afterwards it yields these first, then the rest.

Functions under ``functools.lru_cache`` (tables of positions, masks): dry runs leave no fake tensors in their caches.

Nothing can be taken out of such a cache, and it does not tell what it holds. But the garbage collector knows what an
object refers to. A cache that has got a fake tensor is emptied: its function computes the others again, too.

The garbage collector does not tell which objects are frozen (``gc.freeze``, which processes call before they fork). So
the modules are searched as well where some are.
"""

import dis
import functools
import gc
import inspect
import io
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from smp_strategy.model.trace.snapshot import Snapshot, containers_in, is_of_library, is_ours, is_own_object

__all__ = [
    "Chosen",
    "ClassAttributes",
    "Variable",
    "Variables",
    "variables_of",
    "variables_restored",
    "iterators_rewound",
    "MemoizedFunctions",
    "hide_fakes",
]


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


@final
class Rewindable(Iterator[Any]):
    """Iterator that can be rewound; all other attributes are those of the wrapped iterator.

    Args:
        iterator: Iterator to wrap.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._ahead: deque[Any] = deque()
        self._given: list[Any] | None = None
        self.is_needed = False
        """Whether it has ever been rewound with items."""

    def __next__(self) -> Any:
        item = self._ahead.popleft() if self._ahead else next(self._iterator)
        if self._given is not None:
            self._given.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_iterator"], name)

    def begin(self) -> None:
        """Start to record items."""
        self._given = []

    def rewind(self) -> Iterator[Any]:
        """Yield the recorded items again; returns this object, or the bare iterator if nothing was ever recorded."""
        given, self._given = self._given or [], None
        self._ahead.extendleft(reversed(given))
        self.is_needed |= bool(given)
        return self if self.is_needed else self._iterator


@contextmanager
def iterators_rewound(holders: Iterable[MutableMapping[str, Any]]) -> Iterator[None]:
    """Rewind afterwards all iterators that are values in ``holders``."""
    places = [(holder, name, held) for holder in holders for name, held in list(holder.items()) if _is_iterator(held)]
    instead = {id(held): held if isinstance(held, Rewindable) else Rewindable(held) for _, _, held in places}
    for each in instead.values():
        each.begin()
    for holder, name, held in places:
        holder[name] = instead[id(held)]
    try:
        yield
    finally:
        after = {key: each.rewind() for key, each in instead.items()}
        for holder, name, held in places:
            holder[name] = after[id(held)]


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


_Memoized = functools._lru_cache_wrapper
_MOST_LEVELS = 4
# Symbolic sizes are computed with hundreds of large caches, of expressions only.
_OF_SYMBOLS = ("sympy.", "mpmath.")


@final
class MemoizedFunctions:
    """The memoized functions of this process."""

    def __init__(self) -> None:
        # With the number of results that each had computed after the last dry run.
        self._found: list[tuple[_Memoized[Any], int]] | None = None

    def look(self) -> None:
        """Find those that exist by now, at the next use; it takes a while."""
        self._found = None

    @contextmanager
    def without_fakes(self) -> Iterator[None]:
        """Context of a dry run: afterwards no cache holds fake tensors of it."""
        if self._found is None:
            self._found = [(each, each.cache_info().misses) for each in _memoized_functions()]
        try:
            yield
        finally:
            self._found = [(each, _emptied_of_fakes(each, misses)) for each, misses in self._found]


def _memoized_functions() -> list["_Memoized[Any]"]:
    found = [each for each in gc.get_referrers(_Memoized) if type(each) is _Memoized]
    if gc.get_freeze_count():
        found += [each for module in list(sys.modules.values()) for each in _defined_in(module)]
    return [each for each in dict.fromkeys(found) if not (each.__module__ or "").startswith(_OF_SYMBOLS)]


@functools.cache
def _defined_in(module: ModuleType) -> tuple["_Memoized[Any]", ...]:
    """Functions of a module, and methods of its classes. Later ones are not frozen."""
    values = list(getattr(module, "__dict__", {}).values())
    seen = set[int]()
    for each in values:
        # Not `isinstance`: it asks an object, and some import more, or warn, when they are asked.
        is_new_class = issubclass(type(each), type) and id(each) not in seen
        if is_new_class and vars(each).get("__module__") == module.__name__:
            seen.add(id(each))
            values += vars(each).values()  # also of the classes inside this one
    inside = [each.__func__ if type(each) in (staticmethod, classmethod) else each for each in values]
    return tuple(each for each in inside if type(each) is _Memoized)


def _emptied_of_fakes(memoized: "_Memoized[Any]", misses: int) -> int:
    """Empty the cache if it holds fake tensors, which it does not if it has computed only ``misses`` results."""
    now = memoized.cache_info().misses
    if now == misses or not _holds_fakes(gc.get_referents(memoized), _MOST_LEVELS):
        return now
    memoized.cache_clear()
    return 0


def hide_fakes(values: Iterable[Any]) -> None:
    """Take the fake tensors out of the dicts among and in ``values``, caches of dry runs that will be restored."""
    for container in containers_in(values):
        if isinstance(container, dict):
            for key in [key for key, value in container.items() if _holds_fakes([value], 1)]:
                del container[key]


def _holds_fakes(values: list[Any], levels: int) -> bool:
    if any(isinstance(value, FakeTensor | torch.SymInt) for value in values):
        return True
    inside = [
        value for value in values if type(value) in (dict, list, tuple) or type(value).__name__ == "_lru_list_elem"
    ]
    return levels > 0 and any(_holds_fakes(gc.get_referents(value), levels - 1) for value in inside)
