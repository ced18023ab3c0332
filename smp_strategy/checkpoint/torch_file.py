"""One file of ``torch.save`` with whole tensors, from states that are spread over ranks and never whole in memory.

An :class:`UnfilledState` has memory for all tensors that nobody touches, so the system provides none. ``torch.save``
lays the file out with them, and their places in the file are passed over. Global rank 0 then gathers one tensor after
the other, and writes it to its place. The file is that of ``torch.save``, with its checksums; only the number in its
record ``.data/serialization_id``, which ``torch.load`` only logs, does not depend on the values.

Writing follows [Note: errors of writers] of :mod:`smp_strategy.checkpoint.spread_state`.
"""

import math
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, BinaryIO, Final, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from smp_strategy.checkpoint.spread_state import FirstError, SpreadState, each_in_turn
from smp_strategy.checkpoint.storage.async_save import raw
from smp_strategy.checkpoint.storage.full_file_checksums import values_at
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.distributed.rendezvous import alike
from smp_strategy.errors import CheckpointError

__all__ = ["UnfilledState", "without_checksums", "write_torch_file"]

_WRITER: Final = 0
_DESCRIPTOR: Final = b"PK\x07\x08"


@final
class UnfilledState:
    """Whole state on global rank 0, whose tensors have memory but no values yet.

    Attributes:
        spread: As given.
        tensors: Tensors without values by their first names; on global rank 0 only.
    """

    def __init__(self, spread: SpreadState) -> None:
        self.spread = spread
        is_here = dist.get_rank() == _WRITER
        self.tensors = {name: _unfilled(info) for name, info in spread.tensors().items()} if is_here else {}

    def entries(self) -> "OrderedDict[str, Any]":
        """The state dict on global rank 0, an empty one elsewhere. Tied tensors are one."""
        return self.spread.entries(self.tensors) if dist.get_rank() == _WRITER else OrderedDict()


def write_torch_file(
    states: Sequence[UnfilledState],
    make: Callable[[], Any],
    opened: Callable[[], AbstractContextManager[BinaryIO]],
    *,
    doing: str,
) -> None:
    """Write an object to a file, with the values of ``states``. Collective over all ranks.

    Args:
        states: Their tensors are gathered one by one.
        make: Makes the object, which has the tensors of ``states`` themselves. It may have other tensors, too. It is
            called on global rank 0.
        opened: Context of the new file, on global rank 0, around all that is done to it.
        doing: What this is, for messages: "saving the state of an optimizer".

    Raises:
        CheckpointError: a tensor would have no values, because the object has a copy of it, or nothing.
        PeerFailedError: global rank 0 could not write.
    """
    parts = [(state, name) for state in states for name in state.spread.tensors() if state.spread.num_bytes(name)]
    with ExitStack() as stack:
        file: _LaidOutFile | None = None
        with alike(doing):
            if dist.get_rank() == _WRITER:
                file = _LaidOutFile(
                    stack.enter_context(opened()), make(), [(name, state.tensors[name]) for state, name in parts]
                )
        errors = FirstError()

        def write(part: tuple[UnfilledState, str]) -> None:
            state, name = part
            value = state.spread.collected(name, _WRITER)
            if file is not None and value is not None:
                errors.attempt(partial(file.fill, state.tensors[name], value))

        each_in_turn(parts, [state.spread.num_bytes(name) for state, name in parts], write, errors, doing)
        with alike(doing):
            if file is not None:
                file.end()
            stack.close()


def _unfilled(info: LocalTensorInfo) -> Tensor:
    # Unlike `torch.empty`, this fills nothing with NaN under `torch.use_deterministic_algorithms`.
    storage = torch.UntypedStorage(math.prod(info.shape) * info.dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=info.dtype, device="cpu").set_(storage).view(info.shape)


@contextmanager
def without_checksums() -> Iterator[None]:
    """Context in which ``torch.save`` computes no checksums."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


@final
class _LaidOutFile:
    """File of ``torch.save`` with room for the values of some tensors; those of others are there.

    Args:
        file: New file, open for writing and reading.
        content: Object that it has.
        unfilled: Tensors in it without values, with names for messages.
    """

    def __init__(self, file: BinaryIO, content: Any, unfilled: Sequence[tuple[str, Tensor]]) -> None:
        self._file = file
        self._has_checksums = get_crc32_options()
        layout = _LayoutSink(file, {tensor.data_ptr(): tensor.nbytes for _, tensor in unfilled})
        with without_checksums():  # they would read all the memory
            torch.save(content, layout)  # type: ignore[arg-type] # only `write` and `flush` are used
        self._offsets, self._checksums = layout.offsets, layout.checksums
        if lost := [name for name, tensor in unfilled if tensor.data_ptr() not in self._offsets]:
            raise CheckpointError(f"`{min(lost)}` would have no values: the object in the file has a copy, or nothing.")

    def fill(self, unfilled: Tensor, value: Tensor) -> None:
        data = raw(value.cpu().contiguous())
        offset = self._offsets[unfilled.data_ptr()]
        self._file.seek(offset)
        self._file.write(data)
        if self._has_checksums:
            self._checksums[offset] = zlib.crc32(data)

    def end(self) -> None:
        """Write the checksums of the zip archive, for which the values were missing."""
        if not self._has_checksums:
            return
        file = self._file
        with zipfile.ZipFile(file, "a") as archive:
            for record in archive.infolist():
                offset = values_at(file, record.header_offset)
                record.CRC = self._checksums[offset] if record.file_size else 0
                file.seek(offset + record.file_size)
                if file.read(len(_DESCRIPTOR)) == _DESCRIPTOR:
                    file.write(struct.pack("<I", record.CRC))
            archive.comment = b""  # lets it write the table of contents again


@final
class _LayoutSink:
    """Sink for ``torch.save`` that leaves room for some values, and passes on everything else.

    Args:
        file: Takes it.
        sizes: Bytes of each of these values, by its address in memory.

    Attributes:
        offsets: Offset of each in the file, by its address.
        checksums: CRC-32 of everything else that came in one piece, by its offset.
    """

    def __init__(self, file: BinaryIO, sizes: Mapping[int, int]) -> None:
        self._file = file
        self._sizes = sizes
        self.offsets: dict[int, int] = {}
        self.checksums: dict[int, int] = {}

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes, or leave them out."""
        view = memoryview(data)
        address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
        position = self._file.tell()
        if self._sizes.get(address) == view.nbytes:
            self.offsets[address] = position
            self._file.seek(view.nbytes, os.SEEK_CUR)
        else:
            self.checksums[position] = zlib.crc32(view)
            self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Flush the buffer; ``torch.save`` calls it."""
        self._file.flush()
