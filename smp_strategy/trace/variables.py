"""Undo what code does to variables around its functions: a list at the top of a script, a count in a notebook.

Looked at are the functions of the modules' classes, the step, and functions that these name: global variables and those
of enclosing functions, attributes of the classes, and the lists, dicts and sets in all of them. Libraries are left
alone: what they keep for themselves (a cache, a registry) is not the user's.
"""

import copy
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, final

from torch import nn

from smp_strategy.trace.attributes import containers_in, refill

__all__ = ["variables_restored"]

_MISSING = object()


@contextmanager
def variables_restored(modules: Iterable[nn.Module], step: Callable[..., Any] | None = None) -> Iterator[None]:
    """Afterwards variables that code of ``modules`` and ``step`` name hold what they held before."""
    found = _Variables()
    for kind in {each for module in modules for each in type(module).__mro__}:
        found.look_at_class(kind)
    if step is not None:
        found.look_at(step)
    contents = [(each, copy.copy(each)) for each in containers_in(found.values())]
    try:
        yield
    finally:
        found.restore()
        for container, inside in contents:
            refill(container, inside)


@final
class _Variables:
    """Variables, by the names and cells that hold them, with their values of now."""

    def __init__(self) -> None:
        self._of_modules: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._of_functions: dict[int, tuple[CellType, Any]] = {}
        self._of_classes: list[Any] = []
        self._seen = set[int]()
        self._libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}

    def look_at_class(self, kind: type) -> None:
        """Take in what its functions name, and its attributes."""
        if self._is_of_library(kind):
            return
        for value in vars(kind).values():
            self.look_at(value.fget if isinstance(value, property) else value)
        self._of_classes += vars(kind).values()

    def look_at(self, value: Any) -> None:
        """Take in what ``value`` names, if it is a function."""
        function = _function_of(value)
        if function is None or id(function) in self._seen:
            return
        self._seen.add(id(function))
        if self._is_of_library(function):
            return
        for cell in function.__closure__ or ():
            inside = _contents(cell)
            self._of_functions[id(cell)] = (cell, inside)
            self.look_at(inside)
        for name in _names(function.__code__):
            held = function.__globals__.get(name, _MISSING)
            self._of_modules[id(function.__globals__), name] = (function.__globals__, held)
            self.look_at(held)

    def values(self) -> list[Any]:
        """What they hold."""
        held = [value for _, value in (*self._of_modules.values(), *self._of_functions.values())]
        return [*held, *self._of_classes]

    def restore(self) -> None:
        """Let all of them hold that again."""
        for (_, name), (variables, held) in self._of_modules.items():
            if held is _MISSING:
                variables.pop(name, None)
            elif variables.get(name, _MISSING) is not held:
                variables[name] = held
        for cell, held in self._of_functions.values():
            if held is not _MISSING and _contents(cell) is not held:
                cell.cell_contents = held

    def _is_of_library(self, defined: type | FunctionType) -> bool:
        """Whether it is defined in what is installed, in Python's own modules or in this package."""
        if defined.__module__ in {"__main__", "__mp_main__"}:  # a script, or a notebook, which has no file
            return False
        if defined.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return True
        file = getattr(sys.modules.get(defined.__module__), "__file__", None)
        return file is None or any(Path(file).is_relative_to(library) for library in self._libraries)


def _function_of(value: Any) -> FunctionType | None:
    """The function that a method, a partial or what wraps a function calls."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    """Names that ``code`` looks up, also in functions inside of it: of globals, and of attributes."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING
