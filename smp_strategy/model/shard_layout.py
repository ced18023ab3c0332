"""Shard layout: the elements of a tensor that a rank holds, as a cut along a dim, a run of elements, or rectangles.

Tensor parallelism cuts a tensor along one dim (:class:`Cut`). Sharding keeps a run of consecutive elements of the part
that is left (:class:`Run`). Checkpoints store rectangles (:class:`Rectangle`), and :func:`shard_rectangles` turns the
other two into those::

    whole 6 x 4  -- Cut -->  part 3 x 4  -- Run -->  5 elements of the part  =  at most 3 rectangles of the whole

A run of row-major elements is the rest of a first row, whole rows, and the beginning of a last row, where a row is a
tensor of one dim less. So a run in n dims has at most 2 n - 1 rectangles::

    elements 3 to 12 of a 4 x 4 matrix        . . . a
                                              b b b b
                                              b b b b
                                              c . . .

Plain numbers; the only tensors here are arguments of which views or parts are taken.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

__all__ = ["Cut", "Rectangle", "Run", "difference", "disjoint", "intersection", "shard_rectangles"]


class Run(NamedTuple):
    """Consecutive elements of a tensor, ``start <= number < stop``, in the order in which they stand in memory."""

    start: int
    stop: int

    def rectangles(self, shape: Sequence[int], stride: Sequence[int] | None = None) -> Iterator["Rectangle"]:
        """The rectangles that make up the run, in the order of memory; none is empty.

        Args:
            shape: Shape of the tensor.
            stride: Strides of the tensor, without gaps; ``None``: row-major.
        """
        dims = range(len(shape))
        # From the slowest dim in memory to the fastest: in this order the tensor is row-major.
        order = list(dims) if stride is None else sorted(dims, key=lambda dim: (-stride[dim], dim))
        back = [order.index(dim) for dim in dims]
        for offsets, sizes in _row_major(tuple(shape[dim] for dim in order), self.start, self.stop):
            yield Rectangle(tuple(offsets[place] for place in back), tuple(sizes[place] for place in back))


class Rectangle(NamedTuple):
    """A rectangle of elements; of a tensor without dims, its element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Rectangle":
        """All elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def run_in(self, shape: Sequence[int]) -> Run | None:
        """The run of elements of a row-major tensor that is this rectangle, if it is one."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        start = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        inner = next((dim for dim, size in enumerate(self.sizes) if size != 1), len(shape))
        if tuple(self.sizes[inner + 1 :]) != tuple(shape[inner + 1 :]):
            return None
        return Run(start, start + self.numel)

    def view_of(self, tensor: Tensor, held: "Rectangle | None" = None) -> Tensor:
        """The view of ``tensor`` that is this rectangle.

        Args:
            tensor: Values of the rectangle ``held``.
            held: Contains this one; ``None``: ``tensor`` is whole.
        """
        for dim, (offset, size) in enumerate(zip(*self, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset if held is None else offset - held.offsets[dim], size)
        return tensor

    def view_of_run(self, values: Tensor, start: int, stride: Sequence[int]) -> Tensor:
        """The view of ``values`` that is this rectangle.

        Args:
            values: One-dimensional; elements of a run that contains all of the rectangle.
            start: Number of the first of ``values`` in the tensor, in the order of memory.
            stride: Strides of the tensor, without gaps; those of the view too, as a run leaves out no element.
        """
        first = sum(offset * step for offset, step in zip(self.offsets, stride, strict=True)) - start
        (apart,) = values.stride()
        return values.as_strided(self.sizes, [step * apart for step in stride], values.storage_offset() + first * apart)


@final
@dataclass(frozen=True)
class Cut:
    """Division of a tensor along one dim over the ranks of a tensor-parallel group.

    Where several matrices are fused into one (queries, keys and values), each is cut by itself, so that every rank has
    a part of each. Parts are multiples of what must stay together (the columns of an attention head) and as equal as
    that allows; they need not be equal, so nothing is ever padded. For two fused matrices of three heads with two
    columns each, on two ranks::

        whole   | a0 a0 a1 a1 a2 a2 | b0 b0 b1 b1 b2 b2 |
        rank 0  | a0 a0 a1 a1 | b0 b0 b1 b1 |
        rank 1  | a2 a2 | b2 b2 |
    """

    dim: int
    """The dim that is cut."""
    blocks: tuple[tuple[int, ...], ...]
    """For each fused matrix the lengths of the ranks' parts."""

    @classmethod
    def evenly(cls, dim: int, length: int, num_ranks: int, *, num_blocks: int = 1, granule: int = 1) -> Self:
        """Parts that are as equal as possible; the first ones are larger where they cannot be equal.

        Args:
            dim: Dim to cut.
            length: Length of the whole tensor along it.
            num_ranks: Number of parts.
            num_blocks: Number of fused matrices, all of one length.
            granule: Number of elements that stay together.

        Raises:
            ValueError: ``length`` is not made of so many blocks of such granules, or of too few for the ranks.
        """
        block, rest = divmod(length, num_blocks)
        granules, odd = divmod(block, granule)
        if rest or odd or granules < num_ranks:
            raise ValueError(
                f"{length} elements in {num_blocks} blocks of parts of {granule} cannot be cut for {num_ranks} ranks"
            )
        least, more = divmod(granules, num_ranks)
        parts = tuple(granule * (least + (rank < more)) for rank in range(num_ranks))
        return cls(dim, (parts,) * num_blocks)

    @property
    def length(self) -> int:
        """Length of the whole tensor along the dim that is cut."""
        return sum(map(sum, self.blocks))

    def length_of(self, rank: int) -> int:
        """Length of the part of ``rank`` along the dim that is cut."""
        return sum(parts[rank] for parts in self.blocks)

    def segments(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """For each fused matrix, where the segment of ``rank`` begins in its part and in the whole, and its length."""
        mine = whole = 0
        for lengths in self.blocks:
            yield mine, whole + sum(lengths[:rank]), lengths[rank]
            mine, whole = mine + lengths[rank], whole + sum(lengths)

    def rectangles(self, part: Rectangle, rank: int) -> Iterator[tuple[Rectangle, Rectangle]]:
        """Rectangles of the whole tensor that make up a rectangle of a part; several, where matrices are fused.

        Returns:
            Each as a rectangle of the whole tensor, and the same as a rectangle of the part.
        """
        offset, size = part.offsets[self.dim], part.sizes[self.dim]
        for mine, whole, length in self.segments(rank):
            start, stop = max(offset, mine), min(offset + size, mine + length)
            if start < stop:
                yield (
                    _with_span(part, self.dim, whole + start - mine, stop - start),
                    _with_span(part, self.dim, start, stop - start),
                )

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The part of ``whole`` that ``rank`` holds, in memory of its own."""
        return torch.cat(list(self._pieces(whole, rank)), self.dim)

    def fill(self, part: Tensor, whole: Tensor, rank: int) -> None:
        """Copy to ``part`` the elements of ``whole`` that ``rank`` holds; dtype and device may differ."""
        mine = part.split([lengths[rank] for lengths in self.blocks], self.dim)
        for target, source in zip(mine, self._pieces(whole, rank), strict=True):
            target.copy_(source)

    def _pieces(self, whole: Tensor, rank: int) -> Iterator[Tensor]:
        for _, start, length in self.segments(rank):
            yield whole.narrow(self.dim, start, length)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the parts of all ranks; the inverse of :meth:`part`."""
        by_rank = [part.split([lengths[rank] for lengths in self.blocks], self.dim) for rank, part in enumerate(parts)]
        return torch.cat([part for block in zip(*by_rank, strict=True) for part in block], self.dim)


def shard_rectangles(
    shape: Sequence[int], stride: Sequence[int], *, run: Run | None = None, cut: Cut | None = None, rank: int = 0
) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Rectangles of a whole tensor that a rank holds after a cut and, within the part, a run.

    Args:
        shape: Shape of the rank's part.
        stride: Strides of the part, without gaps. Not used without ``run``.
        run: Elements of the part that the rank holds; ``None``: all of them.
        cut: Division of the whole tensor; ``None``: the part is the whole tensor.
        rank: Rank in the tensor-parallel group that holds the part.

    Returns:
        Each as a rectangle of the whole tensor, and the same as a rectangle of the part.
    """
    for part in [Rectangle.whole(shape)] if run is None else run.rectangles(shape, stride):
        if cut is None:
            yield part, part
        else:
            yield from cut.rectangles(part, rank)


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """The elements of both rectangles, if there are any."""
    offsets, sizes = [], []
    for first, length, begin, extent in zip(*one, *other, strict=True):
        start, stop = max(first, begin), min(first + length, begin + extent)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Rectangle(tuple(offsets), tuple(sizes))


def difference(one: Rectangle, other: Rectangle) -> list[Rectangle]:
    """The elements of the first rectangle without those of the other, as rectangles that do not overlap."""
    common = intersection(one, other)
    if common is None:
        return [one]
    left = []
    # Slabs before and behind the common part, dim by dim; in later dims only what the earlier ones have in common.
    for dim, (start, length) in enumerate(zip(*common, strict=True)):
        stop, end = start + length, one.offsets[dim] + one.sizes[dim]
        for begin, until in ((one.offsets[dim], start), (stop, end)):
            if begin < until:
                left.append(_with_span(one, dim, begin, until - begin))
        one = _with_span(one, dim, start, length)
    return left


def disjoint(rectangles: Iterable[Rectangle]) -> dict[Rectangle, Rectangle]:
    """Rectangles that cover the same elements as the given ones, each element once, with the given one each is part of.

    A rectangle without overlap is kept as it is. The result is in the order of the given ones' offsets.
    """
    found: dict[Rectangle, Rectangle] = {}
    near: list[Rectangle] = []  # of those found, the ones that can overlap with the next given one
    for given in sorted(set(rectangles), key=lambda each: (each.offsets, tuple(-size for size in each.sizes))):
        if given.offsets:
            near = [each for each in near if each.offsets[0] + each.sizes[0] > given.offsets[0]]
        left = [given] if given.numel or not found else []
        for other in near:
            left = [part for each in left for part in difference(each, other)]
        found.update(dict.fromkeys(left, given))
        near += left
    return found


def _with_span(rectangle: Rectangle, dim: int, offset: int, size: int) -> Rectangle:
    """The rectangle with another extent along one dim."""
    offsets, sizes = rectangle
    return Rectangle((*offsets[:dim], offset, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))


def _row_major(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles of elements ``start`` to ``stop`` of a row-major tensor."""
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


def _in_row(inner: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    for offsets, sizes in _row_major(inner, start, stop):
        yield Rectangle((row, *offsets), (1, *sizes))
