"""Safe ``torch.load``: no code of a file is run, a few more plain types are allowed, and errors are clear.

``torch.load(..., weights_only=True)`` makes objects of the classes on its list only, so that a hostile file cannot run
code. Some harmless types of hyper-parameters are not on it: OmegaConf's containers, which every Hydra application has,
paths, spans of time. They are values and run nothing when they are made, so they are added
(:func:`allowing_plain_values`).

Objects of other classes would be written and never read again, so :func:`check_content` refuses them before they are
written. :func:`plain_content` converts the harmless ones that scripts have without noticing. :func:`load_file` maps a
file of ``torch.save``, by any program; its values are read when they are used.
"""

import collections
import datetime
import functools
import pathlib
import pickle
import re
import typing
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from smp_strategy.errors import CheckpointError, ConfigError, DamagedError
from smp_strategy.model.trace.pytree import nodes

__all__ = ["allowing_plain_values", "check_content", "load_failure", "load_file", "plain_content"]

# PyTorch's messages that name the class or function.
_NAMED = (
    re.compile(r"GLOBAL (\S+)"),
    re.compile(r"but got <(?:class|function) '?([\w.]+)"),
    re.compile(r"(?:unsupported|Unsupported) (?:class|type|function) (\S+)"),
)

_NODES = ("AnyNode", "StringNode", "PathNode", "IntegerNode", "BytesNode", "FloatNode", "BooleanNode", "EnumNode")


def allowing_plain_values() -> AbstractContextManager[Any]:
    """Context in which ``torch.load(..., weights_only=True)`` makes OmegaConf's containers, paths and spans of time,
    too."""
    return torch.serialization.safe_globals(_types())


def load_failure(error: Exception) -> str:
    """The reason why ``torch.load`` failed, with the class or function that the file names, if that is the reason."""
    if not isinstance(error, pickle.UnpicklingError):
        return f"cannot be loaded: {type(error).__name__}: {error}".strip().partition("\n")[0]
    told = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    for pattern in _NAMED:
        if found := pattern.search(told):
            named = found[1].rstrip(".,:")
            return f"cannot be loaded without running code: it names `{named}`, which is no type of plain values."
    # Skip the explanation of `weights_only`; the reason comes behind it.
    reasons = [line.strip() for line in told.splitlines() if line.strip() and "weights_only" not in line]
    reason = (reasons or [told])[0].rstrip(".")
    return f"cannot be loaded without running code, or is damaged: {reason}."


@functools.cache
def _types() -> list[Any]:
    plain: list[Any] = [dict, list, tuple, set, frozenset, int, float, str, bool, collections.defaultdict]
    plain += [datetime.timedelta, datetime.datetime, datetime.date, datetime.timezone]
    # Python 3.13 has them in `pathlib._local`, and files come from any version.
    plain += [pathlib.PosixPath, pathlib.PurePosixPath]
    plain += [(pathlib.PosixPath, "pathlib.PosixPath"), (pathlib.PosixPath, "pathlib._local.PosixPath")]
    # OmegaConf stores element types under these names.
    aliases = [(getattr(typing, name), f"typing.{name}") for name in ("Any", "Dict", "List", "Tuple", "Union")]
    return [*plain, *aliases, *_of_omegaconf()]


def _of_omegaconf() -> list[Any]:
    # Imported by name, as omegaconf is optional here and is a framework that only integrations import.
    try:
        omegaconf, base, nodes = map(import_module, ("omegaconf", "omegaconf.base", "omegaconf.nodes"))
    except ImportError:
        return []
    containers = [omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata]
    return [*containers, *(getattr(nodes, name) for name in _NODES)]


_LEAVES: Final = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Tensor, nn.Parameter, torch.Size, torch.device, torch.dtype),
)
_SEQUENCES: Final = (list, tuple, set)
_MAPPINGS: Final = (dict, OrderedDict)
_REMEDIES: Final = {
    "numpy": "Convert it: `tolist()` of an array or a number gives plain ones, `torch.as_tensor` a tensor.",
    "omegaconf": "Convert it: `OmegaConf.to_container(...)`.",
}
_REMEDY: Final = "Give its state instead, for example `scheduler.state_dict()` or `vars(args)`."


def plain_content(value: Any, name: str, note: Callable[[str], None]) -> Any:
    """Content with numbers of numpy as those of Python, and configurations of Transformers as dicts.

    Args:
        value: Value to be written.
        name: Its name, for messages.
        note: Called with a sentence about each configuration.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _MAPPINGS:
        return type(value)(
            (plain_content(k, name, note), plain_content(v, f"{name}[{k!r}]", note)) for k, v in value.items()
        )
    if type(value) in _SEQUENCES:
        return type(value)(plain_content(each, f"{name}[{number}]", note) for number, each in enumerate(value))
    if hasattr(value, "to_dict") and any(each.__module__.startswith("transformers.") for each in type(value).__mro__):
        note(f"`{name}`, a {type(value).__name__}, is written as a dict (`to_dict`), and a dict when it is loaded.")
        return plain_content(value.to_dict(), name, note)
    return value


def check_content(value: Any, name: str) -> None:
    """Refuse a value that could not be read again.

    Raises:
        ConfigError: there is something else in it than dicts, lists, tuples and sets of tensors, numbers, strings,
            bytes and ``None``.
    """
    for path, node in nodes(value, _opened):
        kind = type(node)
        if kind not in (*_LEAVES, *_SEQUENCES, *_MAPPINGS):
            remedy = _REMEDIES.get(kind.__module__.partition(".")[0], _REMEDY)
            raise ConfigError(
                f"`{name}{''.join(path)}` is of type {kind.__module__}.{kind.__qualname__}, which cannot be in a "
                "checkpoint: files are read without making objects of such classes, and hold dicts, lists, tuples and "
                f"sets of tensors, numbers, strings, bytes and None only. {remedy}"
            )


def _opened(node: Any) -> Iterator[tuple[str, Any]]:
    """Keys and items; a container of another class is a leaf."""
    if type(node) in _MAPPINGS:
        for key, item in node.items():
            yield f": key {key!r}", key
            yield f"[{key!r}]", item
    elif type(node) in _SEQUENCES:
        for number, item in enumerate(node):
            yield f"[{number}]", item


def load_file(path: Path, *, weights_only: bool) -> Any:
    """Load a file into host memory.

    Raises:
        CheckpointError: it cannot be loaded without running code.
        DamagedError: it is damaged, or no checkpoint.
        FileNotFoundError, PermissionError: it cannot be opened.
    """
    try:
        with allowing_plain_values():
            return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if not _begins_well(path):
            told = f"{path} is damaged, or no checkpoint: no file of PyTorch begins as it does."
            raise DamagedError(told) from error
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} {load_failure(error)} Load it with `weights_only=False` if you trust whoever wrote it; or "
                "allow its classes, if you know them, by `torch.serialization.add_safe_globals`."
            ) from error
        if not weights_only and not isinstance(error, RuntimeError | EOFError | pickle.UnpicklingError):
            raise  # by a class of the user
        raise DamagedError(f"{path} is damaged, or no checkpoint: {type(error).__name__}: {reason}") from error


def _begins_well(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2).startswith((b"PK", b"\x80"))  # an archive, or a pickle
