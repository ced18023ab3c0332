"""Codec of ``.metadata``, the table of contents of PyTorch's distributed checkpoints.

The file is a pickle, which can run anything when it is read. It is unpickled with nothing but the classes that PyTorch
writes there, which are plain data, and then validated: types, sizes, and that no path leads out of the folder.
"""

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from smp_strategy.checkpoint.storage.dcp_format import Path
from smp_strategy.checkpoint.storage.manifest import is_plain_name
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle

__all__ = ["FILE_NAME", "Chunk", "DirectoryContents", "ItemLocation", "from_bytes", "to_bytes"]

FILE_NAME: Final = ".metadata"

_WITH_MANIFEST: Final = "with manifest.json of smp_strategy"  # in the field for PyTorch's id of a save
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = {
    **dict.fromkeys(
        (
            f"{_METADATA} Metadata",
            f"{_METADATA} MetadataIndex",
            f"{_METADATA} TensorStorageMetadata",
            f"{_METADATA} BytesStorageMetadata",
            f"{_METADATA} ChunkStorageMetadata",
            f"{_METADATA} TensorProperties",
            f"{_METADATA} StorageMeta",
            f"{_METADATA} _MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem _StorageInfo",
            "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
            "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
            "torch Size",
            "torch.serialization _get_layout",
            "collections OrderedDict",
        )
    ),
    "pathlib Path": "pathlib PurePosixPath",
    "pathlib PosixPath": "pathlib PurePosixPath",
    "pathlib PurePosixPath": "pathlib PurePosixPath",
    "pathlib WindowsPath": "pathlib PureWindowsPath",
    "pathlib PureWindowsPath": "pathlib PureWindowsPath",
    # Names in Python 3.13.
    "pathlib._local PosixPath": "pathlib PurePosixPath",
    "pathlib._local WindowsPath": "pathlib PureWindowsPath",
}


class ItemLocation(NamedTuple):
    """File, offset and length of an item."""

    file: str
    offset: int
    """Bytes."""
    length: int
    """Bytes."""


class Chunk(NamedTuple):
    """Stored rectangle of a tensor."""

    part: Rectangle
    location: ItemLocation


@final
class DirectoryContents(NamedTuple):
    """Table of contents of a sharded folder."""

    tensors: Mapping[str, tuple[LocalTensorInfo, tuple[Chunk, ...]]]
    objects: Mapping[str, ItemLocation]
    paths: Mapping[str, Path]
    """Path to each in the nested state, as far as it is known."""
    has_manifest: bool
    """Whether the folder was written with a manifest."""


def to_bytes(contents: DirectoryContents) -> bytes:
    """Content of the file, as PyTorch reads it."""
    kinds: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, (described, chunks) in contents.tensors.items():
        parts = [ChunkStorageMetadata(*map(torch.Size, chunk.part)) for chunk in chunks]
        properties = TensorProperties(dtype=described.dtype)
        kinds[name] = TensorStorageMetadata(properties, torch.Size(described.shape), parts)
        for number, chunk in enumerate(chunks):
            storage[MetadataIndex(name, chunk.part.offsets, number)] = _StorageInfo(*chunk.location)
    for name, location in contents.objects.items():
        kinds[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(*location)
    paths = {name: contents.paths[name] for name in kinds}
    meta = StorageMeta(save_id=_WITH_MANIFEST if contents.has_manifest else None)
    metadata = Metadata(kinds, planner_data=paths, storage_data=storage, storage_meta=meta, version="1.0.0")
    return pickle.dumps(metadata)


def from_bytes(data: bytes) -> DirectoryContents:
    """Parse the content of the file.

    Raises:
        CheckpointError: it is damaged, of an unknown kind, or hostile.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{FILE_NAME} has no description of a checkpoint, but a {type(metadata).__name__}.")
        return _contents(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle can raise anything
        raise CheckpointError(f"{FILE_NAME} cannot be read: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        key = f"{module} {name}"
        if key in _ALLOWED:
            return super().find_class(*(_ALLOWED[key] or key).split(" "))
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.memory_format):
            return found
        raise CheckpointError(
            f"{FILE_NAME} asks for `{module}.{name}`, which no checkpoint of PyTorch does and which may run code when "
            "it is read, so it is not. Do not use this file unless you know where it is from."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(f"{FILE_NAME} refers to something outside: {pid!r:.100}.")


def _contents(metadata: Metadata) -> DirectoryContents:
    locations: dict[tuple[str, tuple[int, ...] | None], ItemLocation] = {}
    for index, info in (metadata.storage_data or {}).items():
        offset = None if index.offset is None else tuple(index.offset)
        locations[index.fqn, offset] = _item_location(index.fqn, info)
    tensors: dict[str, tuple[LocalTensorInfo, tuple[Chunk, ...]]] = {}
    objects: dict[str, ItemLocation] = {}
    for name, kind in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r:.100}")
        if isinstance(kind, TensorStorageMetadata):
            shape = _sizes(kind.size)
            described = LocalTensorInfo(shape, _dtype(kind.properties.dtype))
            parts = [Rectangle(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in kind.chunks]
            tensors[name] = described, tuple(_chunks(name, described, parts, locations))
        elif isinstance(kind, BytesStorageMetadata):
            objects[name] = locations[name, None]
        else:
            raise TypeError(f"`{name}` is a {type(kind).__name__}")
    has_manifest = getattr(metadata.storage_meta, "save_id", None) == _WITH_MANIFEST
    return DirectoryContents(tensors, objects, _paths(metadata.planner_data), has_manifest)


def _chunks(
    name: str,
    described: LocalTensorInfo,
    parts: Iterable[Rectangle],
    locations: Mapping[tuple[str, tuple[int, ...] | None], ItemLocation],
) -> Iterable[Chunk]:
    shape = described.shape
    for part in parts:
        if len(part.offsets) != len(shape) or len(part.sizes) != len(shape):
            raise ValueError(f"`{name}` of shape {shape} has a part at {part}")
        if any(start + size > length for start, size, length in zip(*part, shape, strict=True)):
            raise ValueError(f"`{name}` of shape {shape} has a part at {part}")
        location = locations[name, part.offsets]
        if location.length < math.prod(part.sizes) * described.dtype.itemsize:
            raise ValueError(f"`{name}` has a part of sizes {part.sizes} in {location.length} bytes")
        yield Chunk(part, location)


def _item_location(name: str, info: Any) -> ItemLocation:
    if not isinstance(info, _StorageInfo):
        raise CheckpointError(f"`{name}` is stored as a {type(info).__name__}, which this version cannot read.")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"`{name}` is stored in another form ({info.transform_descriptors!r:.100}), which this version cannot read."
        )
    if not is_plain_name(info.relative_path):
        raise CheckpointError(
            f"`{name}` is said to be in {info.relative_path!r:.100}, which is not a file in the directory."
        )
    return ItemLocation(info.relative_path, *_sizes((info.offset, info.length)))


def _sizes(numbers: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(numbers)
    if not all(type(number) is int and number >= 0 for number in found):
        raise ValueError(f"the sizes {found!r:.100}")
    return found


def _dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype {dtype!r:.100}")
    return dtype


def _paths(found: Any) -> dict[str, Path]:
    if not isinstance(found, Mapping):
        return {}
    return {
        name: path
        for name, path in found.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and all(isinstance(key, str | int) for key in path)
        and path
    }
