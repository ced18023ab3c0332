"""First-fit allocation: the lowest gap that is large enough (pure).

Low addresses are used again first. So what lies above the highest block of a step is not needed, and can be given back
to the system, whatever the sizes of the blocks are.
"""

from bisect import bisect_left, insort
from typing import final

__all__ = ["FirstFit"]


@final
class FirstFit:
    """Allocator of blocks in ``[0, capacity)``; it manages addresses and no memory.

    Args:
        capacity: End of the address range.
        granule: Alignment of blocks; sizes are rounded up to it.

    Attributes:
        peak: End of the highest block since it was last set.
    """

    def __init__(self, capacity: int, granule: int) -> None:
        self._capacity, self._granule = capacity, granule
        # Start and end, in order.
        self._taken: list[tuple[int, int]] = []
        self.peak = 0

    @property
    def end(self) -> int:
        """End of the highest block."""
        return self._taken[-1][1] if self._taken else 0

    @property
    def starts(self) -> list[int]:
        """Starts of all blocks, in order."""
        return [start for start, _ in self._taken]

    def take(self, size: int) -> int | None:
        """Allocate a block.

        Args:
            size: Its size, at least 1.

        Returns:
            Its start; ``None``: no gap is large enough.
        """
        size = -(-size // self._granule) * self._granule
        start = 0
        for begin, end in self._taken:
            if begin - start >= size:
                break
            start = end
        if start + size > self._capacity:
            return None
        insort(self._taken, (start, start + size))
        self.peak = max(self.peak, start + size)
        return start

    def give_back(self, start: int) -> None:
        """Free the block that begins at ``start``."""
        place = bisect_left(self._taken, (start, 0))
        assert self._taken[place][0] == start, "a block is freed that was not allocated"
        del self._taken[place]

    def gaps(self, end: int) -> list[tuple[int, int]]:
        """Start and end of each gap between the blocks, up to ``end``."""
        begins = [0, *(taken_end for _, taken_end in self._taken)]
        ends = [*(start for start, _ in self._taken), end]
        return [(begin, until) for begin, until in zip(begins, ends, strict=True) if begin < until]
