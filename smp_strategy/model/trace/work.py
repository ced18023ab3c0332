"""What a call keeps for its backward, memory by memory, and what it would take to make it again.

Bytes alone do not say what could be kept instead. A call that is computed again keeps its inputs; one that computes the
cheap part again keeps the results of products, too. Nothing has to be computed again that comes after the last thing
that backward needs: the product at the end of a block is never done twice.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from smp_strategy.model.trace.effort import Effort

__all__ = ["Kept", "Memory"]


class Memory(NamedTuple):
    """One storage, however many tensors share it."""

    nbytes: int
    origin: Literal["input", "product", "other"]
    """``input``: it is there before the call. ``product``: a product of matrices, a convolution or an attention has
    made it."""
    is_saved: bool = True
    """Whether backward needs it; otherwise only who computes the call again does."""


class Kept(NamedTuple):
    """All of one call."""

    memories: tuple[Memory, ...] = ()
    again: Effort = Effort()
    """What it takes to make all of it again from the inputs."""
    cheap: Effort = Effort()
    """The part of that which is no product."""

    @property
    def saved_bytes(self) -> int:
        """What backward needs."""
        return sum(memory.nbytes for memory in self.memories if memory.is_saved)

    def nbytes(self, *, origins: Iterable[str], saved_only: bool = False) -> int:
        """Bytes of the memories of some origins."""
        wanted = set(origins)
        return sum(
            memory.nbytes for memory in self.memories if memory.origin in wanted and memory.is_saved >= saved_only
        )
