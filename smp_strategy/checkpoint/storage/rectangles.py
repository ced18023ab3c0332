"""Rectangles of a tensor: what two of them share, what is left of one without others, what is in a row in memory."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["Rectangle", "cut_out", "disjoint", "shared"]


class Rectangle(NamedTuple):
    """A rectangle of elements; of a tensor without dims, all of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)

    def run_in(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The numbers of its first element and of the one behind its last in a row-major tensor, if all between are
        its own."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        start = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        inner = next((dim for dim, size in enumerate(self.sizes) if size != 1), len(shape))
        if tuple(self.sizes[inner + 1 :]) != tuple(shape[inner + 1 :]):
            return None
        return start, start + self.numel


def shared(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """What is in both, if anything."""
    offsets, sizes = [], []
    for first, length, begin, extent in zip(*one, *other, strict=True):
        start, stop = max(first, begin), min(first + length, begin + extent)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Rectangle(tuple(offsets), tuple(sizes))


def without(one: Rectangle, other: Rectangle) -> list[Rectangle]:
    """What is left of the first, as rectangles that do not overlap."""
    common = shared(one, other)
    if common is None:
        return [one]
    left, offsets, sizes = [], list(one.offsets), list(one.sizes)
    for dim, (start, length) in enumerate(zip(*common, strict=True)):
        stop, end = start + length, offsets[dim] + sizes[dim]
        for begin, until in ((offsets[dim], start), (stop, end)):
            if begin < until:
                left.append(
                    Rectangle(
                        (*offsets[:dim], begin, *offsets[dim + 1 :]), (*sizes[:dim], until - begin, *sizes[dim + 1 :])
                    )
                )
        offsets[dim], sizes[dim] = start, length
    return left


def disjoint(rectangles: Iterable[Rectangle]) -> dict[Rectangle, Rectangle]:
    """Rectangles that cover what the given ones cover, each element once, and for each the given one that it is of.

    What does not overlap stays as it is, and comes out in the order of its offsets.
    """
    found: dict[Rectangle, Rectangle] = {}
    near: list[Rectangle] = []  # of what was found, that which can overlap with the next one
    for given in sorted(set(rectangles), key=lambda each: (each.offsets, tuple(-size for size in each.sizes))):
        if given.offsets:
            near = [each for each in near if each.offsets[0] + each.sizes[0] > given.offsets[0]]
        left = [given] if given.numel or not found else []
        for other in near:
            left = [part for each in left for part in without(each, other)]
        found.update(dict.fromkeys(left, given))
        near += left
    return found


def cut_out(tensor: Tensor, place: Rectangle, wanted: Rectangle) -> Tensor:
    """The view of ``tensor``, which is at ``place``, that ``wanted``, a part of that, is."""
    for dim, (offset, size) in enumerate(zip(*wanted, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset - place.offsets[dim], size)
    return tensor
