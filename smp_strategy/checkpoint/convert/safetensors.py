"""Reads and writes safetensors: one file, or several with an index, in the layout of Hugging Face."""

import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.storage.manifest import is_plain_name
from smp_strategy.checkpoint.storage.weight_file import DTYPE_NAMES, SafetensorsFile
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import CheckpointError

__all__ = ["INDEX", "INDEX_ENDING", "indexed", "open_safetensors", "shards", "write_safetensors"]

INDEX_ENDING: Final = ".safetensors.index.json"
INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def open_safetensors(path: Path) -> CheckpointContents:
    """Open a file, an index of several, or a folder with one or the other.

    Raises:
        CheckpointError: something of it is lacking or damaged.
    """
    weights: dict[str, Any] = {}
    for file, names in _files(path).items():
        try:
            with safe_open(file, framework="pt") as opened:
                for name in list(opened.keys()) if names is None else names:
                    part = opened.get_slice(name)
                    dtype = _DTYPES[part.get_dtype()]
                    weights[name] = LazyTensor(tuple(part.get_shape()), dtype, partial(_read, file, name))
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{file} is damaged, lacks a tensor, or is no safetensors file: {error}") from error
    return CheckpointContents(kind="safetensors", weights=weights)


def _files(path: Path) -> Mapping[Path, list[str] | None]:
    """Files with the names of the tensors to read from each; ``None``: all."""
    if path.is_file():
        return indexed(path) if path.name.endswith(INDEX_ENDING) else {path: None}
    indices, files = sorted(path.glob(f"*{INDEX_ENDING}")), sorted(path.glob("*.safetensors"))
    if len(indices) > 1 or (not indices and len(files) > 1):
        several = indices or files
        raise CheckpointError(
            f"{path} has several sets of weights: {', '.join(each.name for each in several)}. Give one file."
        )
    return indexed(indices[0]) if indices else dict.fromkeys(files)


def indexed(index: Path) -> dict[Path, list[str]]:
    """Files that an index names, which must be beside it, with the names of the tensors in each.

    Raises:
        CheckpointError: it is damaged, or names files elsewhere.
    """
    found: dict[Path, list[str]] = {}
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_once)
        for name, file in content["weight_map"].items():
            if not isinstance(file, str):
                raise TypeError(f"`{name}` is said to be in {file!r}")
            if not is_plain_name(file):
                raise CheckpointError(f"{index} names the file {file!r}, which is outside of the directory.")
            found.setdefault(index.parent / file, []).append(name)
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of files with weights: {error}") from error
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"it has `{twice}` twice")
    return found


def _read(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"`{name}` cannot be read from {file}: {error}") from error


def shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Assign tensors to files: in their order, each file as full as it may be.

    A tensor that is too large for any file has one of its own::

        most 5     a 4   b 2   c 2   d 9   e 1     ->     [a] [b c] [d] [e]
    """
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(name)
        room = max(room - size, 0)
    return found


def write_safetensors(
    directory: Path,
    tensors: Mapping[str, LazyTensor],
    *,
    max_bytes: int,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Write ``tensors`` to files in an existing folder; one tensor at most is in memory.

    Args:
        directory: Gets ``model.safetensors``, or ``model-00001-of-00002.safetensors``, ... and an index.
        tensors: Tensors by their names.
        max_bytes: Bytes of the tensors in one file, if it has more than one tensor.
        progress: Called with the name of each tensor that has been read.
    """
    parts = shards({name: tensor.num_bytes for name, tensor in tensors.items()}, max_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts or [[]], 1):
        file = "model.safetensors" if len(parts) <= 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        infos = {name: LocalTensorInfo(tensors[name].shape, tensors[name].dtype) for name in names}
        with contextlib.closing(SafetensorsFile(directory / file, infos, {"format": "pt"})) as written:
            for name in names:
                written.write(name, tensors[name].read())
                progress(name)
        weight_map.update(dict.fromkeys(names, file))
    files = list(dict.fromkeys(weight_map.values()))
    if len(parts) > 1:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files.append(INDEX)
    return [directory / file for file in files]
