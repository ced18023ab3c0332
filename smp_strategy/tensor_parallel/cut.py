"""How a parameter is divided over the ranks of a tensor-parallel group.

It is cut along one dim. Where several matrices are fused into one (queries, keys and values), each is cut by itself, so
that every rank has a part of each. Parts are multiples of what must stay together (the columns of an attention head)
and as equal as that allows; they need not be equal, so nothing is ever padded. For two fused matrices of three heads
with two columns each, on two ranks::

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
    """See the module docstring."""

    dim: int
    """The dim that is cut."""
    blocks: tuple[tuple[int, ...], ...]
    """For each fused matrix the lengths of the ranks' parts."""

    @classmethod
    def evenly(cls, dim: int, length: int, num_ranks: int, *, num_blocks: int = 1, granule: int = 1) -> Self:
        """Parts that are as equal as possible; the first ones are larger where they cannot be equal.

        Args:
            dim: the dim to cut.
            length: of the whole tensor along it.
            num_ranks: how many parts there are.
            num_blocks: fused matrices, all of one length.
            granule: elements that stay together.

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
        """Of the whole tensor along the dim that is cut."""
        return sum(map(sum, self.blocks))

    def length_of(self, rank: int) -> int:
        """Of the part of ``rank`` along the dim that is cut."""
        return sum(parts[rank] for parts in self.blocks)

    def segments(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """For each fused matrix the part of ``rank``: where it begins among its parts and in the whole, its length."""
        mine = whole = 0
        for lengths in self.blocks:
            yield mine, whole + sum(lengths[:rank]), lengths[rank]
            mine, whole = mine + lengths[rank], whole + sum(lengths)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` holds of ``whole``, in memory of its own."""
        return torch.cat(list(self._pieces(whole, rank)), self.dim)

    def fill(self, part: Tensor, whole: Tensor, rank: int) -> None:
        """Copy to ``part`` what ``rank`` holds of ``whole``; dtype and device may differ."""
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
