"""Items of PyTorch's distributed checkpoints (DCP): the output of ``torch.save`` for one tensor or one object.

An item of a tensor is a zip file that has the values as they are in memory. The bytes before and behind them depend on
shape and dtype only, as long as they have no checksums (ours are in the manifest, and faster). So they are made once
for all tensors of a shape, and a tensor is written as fast as its bytes.

:class:`FlatState` is a nested state as DCP has it: flat names, and for each the path to its place.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.utils.serialization import config as _config

from smp_strategy.checkpoint.storage.async_save import raw
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, WholeObject
from smp_strategy.checkpoint.storage.manifest import DigestingFile, Region
from smp_strategy.checkpoint.storage.torch_load import load_failure
from smp_strategy.errors import CheckpointError

__all__ = ["Envelope", "Envelopes", "FlatState", "Path", "check_object", "object_item", "write_item"]

config: Any = _config  # it has no types


class Envelope(NamedTuple):
    """Bytes of a DCP item around the values of a tensor."""

    before: bytes
    behind: bytes


@final
class Envelopes:
    """Cache of envelopes by shape and dtype."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], Envelope] = {}

    def of(self, tensor: Tensor) -> Envelope:
        """Envelope of a tensor that is contiguous in host memory."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._known:
            self._known[key] = _envelope(tensor)
        return self._known[key]


class _Splitter:
    """Sink for ``torch.save`` that leaves out the values, which it recognises by their address."""

    def __init__(self, start: int, size: int) -> None:
        self._start, self._size = start, size
        self.before, self.behind, self.seen = bytearray(), bytearray(), 0

    def write(self, data: memoryview) -> int:
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data if len(data) else 0
        if self._start <= address < self._start + self._size:
            self.seen += len(data)
        elif self.seen < self._size or not self._size:
            self.before += data
        else:
            self.behind += data
        return len(data)

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


def _envelope(tensor: Tensor) -> Envelope:
    values = raw(tensor)
    # A storage of exactly these bytes, without a copy: torch.save writes whole storages.
    alone = torch.frombuffer(values, dtype=torch.uint8) if len(values) else torch.empty(0, dtype=torch.uint8)
    alone = alone.view(tensor.dtype).view(tensor.shape)
    splitter = _Splitter(alone.data_ptr() if len(values) else 0, len(values))
    with config.patch({"save.compute_crc32": False}):
        torch.save(alone, splitter)  # type: ignore[arg-type]
    assert splitter.seen == len(values), "torch.save has copied the values"
    return Envelope(bytes(splitter.before), bytes(splitter.behind))


def object_item(value: Any) -> bytes:
    """DCP item of an object: the output of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def check_object(name: str, item: bytes) -> None:
    """Make sure that an object can be loaded without running code of the file.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        torch.load(io.BytesIO(item), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"`{name}` cannot be saved: a checkpoint has tensors, numbers, texts, and lists and dicts of them; this "
            f"is something else, which {load_failure(error)} Convert it."
        ) from error


def write_item(file: DigestingFile, name: str, *stretches: bytes | memoryview) -> Region:
    """Append the bytes before the values, the values, and the bytes behind them."""
    offset, digests = file.size, []
    for stretch in stretches:
        file.write(stretch)
        digests += file.end_stretch()
    before, values, behind = map(len, stretches)
    return Region(name=name, offset=offset, before=before, values=values, behind=behind, digests=tuple(digests))


Path = tuple[str | int, ...]


@final
@dataclass(frozen=True)
class FlatState:
    """Leaves of a nested state by their flat names."""

    tensors: Mapping[str, HeldTensor]
    objects: Mapping[str, Any]
    paths: Mapping[str, Path]
    """Path to each leaf in the nested state, and to each alias."""
    aliases: Mapping[str, tuple[str, ...]]
    """Further flat names of tied tensors."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "FlatState":
        """Flatten dicts, and lists with dicts or tensors in them, as ``torch.distributed.checkpoint.save`` does.

        Raises:
            CheckpointError: two leaves have the same flat name.
        """
        try:
            flat, found = flatten_state_dict(dict(state))
        except ValueError as error:
            raise CheckpointError(f"The state cannot be saved: {error}. Rename one of the two entries.") from error
        tensors: dict[str, HeldTensor] = {}
        objects: dict[str, Any] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        paths: dict[str, Path] = dict(found)
        for name, leaf in flat.items():
            if isinstance(leaf, Tensor):
                leaf = HeldTensor.whole(leaf.detach())
            if not isinstance(leaf, HeldTensor):
                objects[name] = leaf.value if isinstance(leaf, WholeObject) else leaf
                continue
            tensors[name] = leaf
            if leaf.aliases:
                around = paths[name][:-1]
                further = {".".join(map(str, (*around, alias))): (*around, alias) for alias in leaf.aliases}
                if taken := sorted(further.keys() & flat.keys()):
                    raise CheckpointError(f"`{taken[0]}` is in the state, and is a tied name of `{name}` as well.")
                paths.update(further)
                aliases[name] = tuple(further)
        return cls(tensors, objects, paths, aliases)
