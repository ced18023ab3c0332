"""Tells code and objects of the user from those of libraries."""

import argparse
import functools
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

__all__ = ["is_of_library", "is_own_object", "is_ours"]

# Folders of libraries, of this environment or of others that it is made of.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Of libraries, but made of what the user has put there.
_BARE = (SimpleNamespace, argparse.Namespace)


def is_of_library(defined: type | FunctionType | ModuleType) -> bool:
    """Whether it is defined in what is installed, in Python's own modules or in this package."""
    if isinstance(defined, ModuleType):
        return _is_installed(defined.__name__)
    if defined.__module__ in {"__main__", "__mp_main__"}:  # a script, or a notebook, which has no file
        return False
    return is_ours(defined) or _is_installed(defined.__module__)


def is_ours(defined: type | FunctionType) -> bool:
    """Whether this package defines it."""
    return defined.__module__.partition(".")[0] == __name__.partition(".")[0]


def is_own_object(value: Any) -> bool:
    """Whether ``value`` is an object with attributes, of a class of the user's."""
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
    return not _INSTALLED.isdisjoint(Path(file).parts) or any(Path(file).is_relative_to(each) for each in _libraries())
