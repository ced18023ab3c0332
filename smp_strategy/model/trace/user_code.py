"""Code and objects of the user, told from those of libraries and of this package."""

import argparse
import functools
import pathlib
import sys
import sysconfig
import types
from typing import Any

from torch import Tensor, nn

__all__ = ["is_of_library", "is_ours", "is_own_object"]

# Folders of libraries, in this environment or in one that it extends.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Library classes whose objects have only the attributes that the user gives them.
_BARE = (types.SimpleNamespace, argparse.Namespace)


def is_of_library(defined: type | types.FunctionType | types.ModuleType) -> bool:
    """Whether it is defined in an installed package, in Python's standard library or in this package."""
    if isinstance(defined, types.ModuleType):
        return _is_installed(defined.__name__)
    if defined.__module__ in {"__main__", "__mp_main__"}:  # a script, or a notebook, which has no file
        return False
    return is_ours(defined) or _is_installed(defined.__module__)


def is_ours(defined: type | types.FunctionType) -> bool:
    # Functions of code that was run without a module's name have none.
    return (defined.__module__ or "").partition(".")[0] == __name__.partition(".")[0]


def is_own_object(value: Any) -> bool:
    """Whether ``value`` is an object with attributes, of a class that the user has defined."""
    if isinstance(value, _BARE):
        return True
    has_attributes = isinstance(getattr(value, "__dict__", None), dict)
    return has_attributes and not isinstance(value, (nn.Module, Tensor, type)) and not is_of_library(type(value))


@functools.cache
def _libraries() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@functools.cache
def _is_installed(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return True
    return not _INSTALLED.isdisjoint(pathlib.Path(file).parts) or any(
        pathlib.Path(file).is_relative_to(each) for each in _libraries()
    )
