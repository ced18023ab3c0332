"""Rectangles of a tensor: which ones a run of its elements is, and where those of a part are in the whole.

Files of spread tensors know rectangles only (:mod:`smp_strategy.checkpoint.storage.held_tensor`). A run of elements in
row-major order is a few of them: what is left of a first row, whole rows, and the beginning of a last one, where a row
is a tensor of one dim less. So there are at most 2 n - 1 of them for n dims.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from smp_strategy.checkpoint.storage.held_tensor import Block
from smp_strategy.tensor_parallel.cut import Cut

__all__ = ["Rectangle", "blocks_of_part", "blocks_of_run", "rectangles_of_run"]


class Rectangle(NamedTuple):
    """A rectangle of consecutive elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rectangles_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles that elements ``start`` to ``stop`` of a tensor are, in row-major order; none is empty.

    Args:
        shape: of the tensor.
        start, stop: numbers of elements, ``0 <= start <= stop <= numel``.
    """
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(inner, first, begin, end)
        return
    if begin:
        yield from _in_row(inner, first, begin, row)
        first += 1
    if first < last:
        yield Rectangle((first, *(0 for _ in inner)), (last - first, *inner))
    yield from _in_row(inner, last, 0, end)


def _in_row(inner: Sequence[int], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    for offsets, sizes in rectangles_of_run(inner, start, stop):
        yield Rectangle((row, *offsets), (1, *sizes))


def blocks_of_run(run: Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> list[Block]:
    """The blocks that a run of elements is, as views of it.

    Args:
        run: the elements, one-dimensional.
        start: the number of the first of them, in the order in which they stand in memory.
        shape, stride: of the whole tensor, without gaps.
    """
    # From the slowest dim in memory to the fastest: in this order the tensor is row-major.
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    back = [order.index(dim) for dim in range(len(shape))]
    found, position = [], 0
    for offsets, sizes in rectangles_of_run([shape[dim] for dim in order], start, start + len(run)):
        numel = math.prod(sizes)
        values = run[position : position + numel].view(sizes).permute(back)
        found.append(Block(tuple(offsets[place] for place in back), values))
        position += numel
    return found


def blocks_of_part(block: Block, cut: Cut, rank: int) -> list[Block]:
    """The blocks of the whole tensor that a block of a rank's part is; several, where matrices are fused.

    Args:
        block: its offsets are those in the part of ``rank``.
        cut: how the tensor is divided.
        rank: whose part it is.
    """
    dim, found = cut.dim, []
    first, last = block.offsets[dim], block.offsets[dim] + block.tensor.shape[dim]
    for mine, whole, length in cut.segments(rank):
        start, stop = max(first, mine), min(last, mine + length)
        if start < stop:
            offsets = (*block.offsets[:dim], whole + start - mine, *block.offsets[dim + 1 :])
            found.append(Block(offsets, block.tensor.narrow(dim, start - first, stop - start)))
    return found
