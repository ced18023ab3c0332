"""``Cut``: how a parameter is divided over the ranks of a tensor-parallel group.

A parameter is cut along one dim. If several matrices are fused into one (queries, keys and values), each is cut by
itself, so that every rank has a part of each. Parts are multiples of a granule (the columns of an attention head) and
as equal as that allows; they need not be equal, so nothing is padded. Two fused matrices of three heads with two
columns each, on two ranks::

    whole   | a0 a0 a1 a1 a2 a2 | b0 b0 b1 b1 b2 b2 |
    rank 0  | a0 a0 a1 a1 | b0 b0 b1 b1 |
    rank 1  | a2 a2 | b2 b2 |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

__all__ = ["Cut"]


@final
@dataclass(frozen=True)
class Cut:
    """Division of one parameter over the ranks."""

    dim: int
    """The dim that is cut."""
    blocks: tuple[tuple[int, ...], ...]
    """For each fused matrix, the lengths of the ranks' parts."""

    @classmethod
    def evenly(cls, dim: int, length: int, num_ranks: int, *, num_blocks: int = 1, granule: int = 1) -> Self:
        """Parts as equal as possible; the first ones are larger if they cannot be equal.

        Args:
            dim: Dim to cut.
            length: Length of the whole tensor along it.
            num_ranks: Number of parts.
            num_blocks: Number of fused matrices, all of one length.
            granule: Number of elements that stay together.

        Raises:
            ValueError: ``length`` is not divisible into such blocks and granules, or has too few of them for the
                ranks.
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
        """Length of the whole tensor along the dim."""
        return sum(map(sum, self.blocks))

    def length_of(self, rank: int) -> int:
        """Length of the part of ``rank`` along the dim."""
        return sum(parts[rank] for parts in self.blocks)

    def segments(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """The part of ``rank`` in each fused matrix.

        Yields:
            Its offset in the rank's tensor, its offset in the whole, its length.
        """
        mine = whole = 0
        for lengths in self.blocks:
            yield mine, whole + sum(lengths[:rank]), lengths[rank]
            mine, whole = mine + lengths[rank], whole + sum(lengths)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The part of ``rank`` in ``whole``, as a copy."""
        return torch.cat(list(self._pieces(whole, rank)), self.dim)

    def fill(self, part: Tensor, whole: Tensor, rank: int) -> None:
        """Copy the part of ``rank`` in ``whole`` to ``part``; dtype and device may differ."""
        mine = part.split([lengths[rank] for lengths in self.blocks], self.dim)
        for target, source in zip(mine, self._pieces(whole, rank), strict=True):
            target.copy_(source)

    def _pieces(self, whole: Tensor, rank: int) -> Iterator[Tensor]:
        for _, start, length in self.segments(rank):
            yield whole.narrow(self.dim, start, length)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks; inverse of :meth:`part`."""
        by_rank = [part.split([lengths[rank] for lengths in self.blocks], self.dim) for rank, part in enumerate(parts)]
        return torch.cat([part for block in zip(*by_rank, strict=True) for part in block], self.dim)
