"""Resharding on load: copies stored rectangles of a tensor to the rectangles that this rank holds.

If their intersection is contiguous both in the file and in memory, the bytes are read in place. Otherwise rows of the
stored rectangle are read into a window, and the wanted elements are copied from there.
"""

import io
import math
from collections.abc import Sequence
from typing import Final, Protocol, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.checkpoint.storage.dcp_metadata import Chunk
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.checkpoint.storage.staging import raw
from smp_strategy.checkpoint.storage.torch_load import load_failure
from smp_strategy.checkpoint.storage.verified_reads import DamageError, Files, FileSlice
from smp_strategy.distributed.device import is_host
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle, disjoint, intersection

__all__ = ["Copy", "Values", "check_cover", "copies_of", "scatter", "tensor_in"]

WINDOW: Final = 32 * 2**20  # bytes


class Values(Protocol):
    """Bytes of a row-major array."""

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``start`` on."""


@final
class Copy:
    """Copy of the intersection of a stored and a wanted rectangle."""

    def __init__(self, chunk: Chunk, block: HeldRectangle, common: Rectangle) -> None:
        self.target = common.view_of(block.tensor.detach(), block.place)
        offsets = tuple(offset - start for offset, start in zip(common.offsets, chunk.part.offsets, strict=True))
        self.inside = Rectangle(offsets, common.sizes)
        """The intersection as a rectangle of the stored part."""


def copies_of(held: HeldTensor, chunks: Sequence[Chunk]) -> list[tuple[Chunk, list[Copy]]]:
    """The copies from each stored part that intersects the wanted rectangles."""
    found = []
    for chunk in chunks:
        copies = []
        for block in held.blocks:
            common = intersection(chunk.part, block.place)
            if common is not None and common.numel:
                copies.append(Copy(chunk, block, common))
        if copies or not chunk.part.numel:  # read it anyway: its item can be damaged
            found.append((chunk, copies))
    return found


def check_cover(name: str, held: HeldTensor, chunks: Sequence[Chunk]) -> None:
    """Make sure that the stored parts cover all wanted elements.

    Raises:
        CheckpointError: they do not.
    """
    for block in held.blocks:
        place = block.place
        parts = [common for chunk in chunks if (common := intersection(chunk.part, place)) is not None]
        there = sum(part.numel for part in parts)
        if there > place.numel:
            there = sum(part.numel for part in disjoint(parts))
        if there != place.numel:
            raise CheckpointError(
                f"The checkpoint is not complete: of `{name}`, {place.numel - there} of {place.numel} elements from "
                f"{list(place.offsets)} on are in no file."
            )


def scatter(values: Values, sizes: Sequence[int], dtype: torch.dtype, copies: Sequence[Copy], scratch: Tensor) -> None:
    """Copy from one stored part.

    Args:
        values: Bytes of the part, as stored.
        sizes: Sizes of the part.
        dtype: Dtype of its elements.
        copies: Copies to make.
        scratch: Memory for ``WINDOW`` bytes.
    """
    row = math.prod(sizes[1:]) * dtype.itemsize
    for copy in copies:
        run, target = copy.inside.run_in(sizes), copy.target
        if run is not None and target.dtype == dtype and is_host(target.device) and target.is_contiguous():
            values.read_into(run.start * dtype.itemsize, raw(target))
            continue
        if not sizes:
            values.read_into(0, raw(scratch[: dtype.itemsize]))
            target.copy_(scratch[: dtype.itemsize].view(dtype)[0])
            continue
        step, start = max(1, WINDOW // row), copy.inside.offsets[0]
        for first in range(0, copy.inside.sizes[0], step):
            count = min(step, copy.inside.sizes[0] - first)
            if count * row > scratch.nbytes:  # a row longer than the window
                scratch = torch.from_numpy(np.empty(count * row, dtype=np.uint8))
            window = scratch[: count * row]
            values.read_into((start + first) * row, raw(window))
            rows = window.view(dtype).view(count, *sizes[1:])
            for dim in range(1, len(sizes)):
                rows = rows.narrow(dim, copy.inside.offsets[dim], copy.inside.sizes[dim])
            target.narrow(0, first, count).copy_(rows)


def tensor_in(files: Files, name: str, chunk: Chunk) -> Tensor:
    """A stored part of a folder without a manifest, as a tensor.

    Raises:
        DamageError: it is damaged, or none.
    """
    file, offset, length = chunk.place
    try:
        found = torch.load(
            io.BufferedReader(FileSlice(files, file, offset, length)), map_location="cpu", weights_only=True
        )
    except DamageError:
        raise
    except Exception as error:  # torch.load raises any exception on damaged bytes
        raise DamageError(
            f"{files.directory / file} is damaged, or no file of PyTorch: `{name}` in it {load_failure(error)}"
        ) from error
    if not isinstance(found, Tensor) or tuple(found.shape) != chunk.part.sizes:
        what = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise DamageError(
            f"{files.directory / file} is damaged: of `{name}` it should have a part of shape "
            f"{list(chunk.part.sizes)}, but there is {what}."
        )
    return found
