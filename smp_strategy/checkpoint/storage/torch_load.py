"""Which types a checkpoint may name, beyond tensors and the plain types that PyTorch allows in any case.

``torch.load(..., weights_only=True)`` makes no object of a class that is not on its list, so that a hostile file cannot
run code. What people keep in hyper-parameters is not on it, though harmless: OmegaConf's containers, which every
Hydra application has, paths, spans of time. They are values and run nothing when they are made.
"""

import collections
import datetime
import functools
import pathlib
import pickle
import re
import typing
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch

__all__ = ["allowing_plain_values", "load_failure"]

# How PyTorch says which class or function it was.
_NAMED = (
    re.compile(r"GLOBAL (\S+)"),
    re.compile(r"but got <(?:class|function) '?([\w.]+)"),
    re.compile(r"(?:unsupported|Unsupported) (?:class|type|function) (\S+)"),
)

_NODES = ("AnyNode", "StringNode", "PathNode", "IntegerNode", "BytesNode", "FloatNode", "BooleanNode", "EnumNode")


def allowing_plain_values() -> AbstractContextManager[Any]:
    """In here ``torch.load(..., weights_only=True)`` makes them, too."""
    return torch.serialization.safe_globals(_types())


def load_failure(error: Exception) -> str:
    """Why ``torch.load`` has not loaded a file: which class or function it names, if that is why."""
    if not isinstance(error, pickle.UnpicklingError):
        return f"cannot be loaded: {type(error).__name__}: {error}".strip().partition("\n")[0]
    told = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    for pattern in _NAMED:
        if found := pattern.search(told):
            named = found[1].rstrip(".,:")
            return f"cannot be loaded without running code: it names `{named}`, which is no type of plain values."
    # Behind the explanation of `weights_only`, which is none of this.
    reasons = [line.strip() for line in told.splitlines() if line.strip() and "weights_only" not in line]
    reason = (reasons or [told])[0].rstrip(".")
    return f"cannot be loaded without running code, or is damaged: {reason}."


@functools.cache
def _types() -> list[Any]:
    plain: list[Any] = [dict, list, tuple, set, frozenset, int, float, str, bool, collections.defaultdict]
    plain += [datetime.timedelta, datetime.datetime, datetime.date, datetime.timezone]
    # Newer Pythons have them in a module of their own, and files come from others.
    plain += [pathlib.PosixPath, pathlib.PurePosixPath]
    plain += [(pathlib.PosixPath, "pathlib.PosixPath"), (pathlib.PosixPath, "pathlib._local.PosixPath")]
    # How OmegaConf notes types of elements.
    aliases = [(getattr(typing, name), f"typing.{name}") for name in ("Any", "Dict", "List", "Tuple", "Union")]
    return [*plain, *aliases, *_of_omegaconf()]


def _of_omegaconf() -> list[Any]:
    # By name: what a file holds must not decide about what the package imports.
    try:
        omegaconf, base, nodes = map(import_module, ("omegaconf", "omegaconf.base", "omegaconf.nodes"))
    except ImportError:
        return []
    containers = [omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata]
    return [*containers, *(getattr(nodes, name) for name in _NODES)]
