"""What a call keeps for its backward, memory by memory, and what it would take to make it again.

Bytes alone do not say what could be kept instead. A call that is computed again keeps its inputs; one that computes the
cheap part again keeps the results of products, too. Nothing has to be computed again that comes after the last thing
that backward needs: the product at the end of a block is never done twice.

How long things take: the work of a call, split as a schedule may split it, and the way between two stages.

What a call has a device do, in counts: what a model of the device turns into seconds (:mod:`.machine`).
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

__all__ = ["Effort", "Efforts", "SavedBytes", "Link", "StorageBytes", "Work"]


class Effort(NamedTuple):
    """What one pass has a device do."""

    flops: int = 0
    """Floating-point operations of products of matrices and of convolutions; others do not count beside the bytes."""
    product_bytes: int = 0
    """Bytes that these products read and write."""
    other_bytes: int = 0
    """Bytes that all other kernels read and write."""
    kernels: int = 0
    """Calls of the device."""

    def plus(self, other: "Effort") -> "Effort":
        """Both, one after the other."""
        return Effort(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Efforts(NamedTuple):
    """What the passes of a call have a device do, split like :class:`~smp_strategy.model.trace.work.Work`."""

    forward: Effort = Effort()
    input_gradient: Effort = Effort()
    """The part of backward that the makers of the call's inputs wait for."""
    weight_gradient: Effort = Effort()
    """The part of backward that nobody waits for but the optimizer."""


class StorageBytes(NamedTuple):
    """One storage, however many tensors share it."""

    nbytes: int
    origin: Literal["input", "product", "other"]
    """``input``: it is there before the call. ``product``: a product of matrices, a convolution or an attention has
    made it."""
    is_saved: bool = True
    """Whether backward needs it; otherwise only who computes the call again does."""


class SavedBytes(NamedTuple):
    """All of one call."""

    memories: tuple[StorageBytes, ...] = ()
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


class Work(NamedTuple):
    """Seconds of one call, or of several that run together."""

    forward: float = 0.0
    input_gradient: float = 0.0
    """The part of backward that earlier stages wait for."""
    weight_gradient: float = 0.0
    """The part of backward that nobody waits for but the optimizer (Zero Bubble, arXiv:2401.10241)."""

    @property
    def backward(self) -> float:
        """Both parts."""
        return self.input_gradient + self.weight_gradient

    def scaled(self, factor: float) -> "Work":
        """The same, taking ``factor`` times as long."""
        return Work(*(factor * seconds for seconds in self))

    def plus(self, other: "Work") -> "Work":
        """Both, one after the other."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Link(NamedTuple):
    """What lies between two stages."""

    latency: float
    """Seconds until the first byte of a message arrives."""
    bytes_per_second: float

    @classmethod
    def instant(cls) -> Self:
        """Messages that take no time."""
        return cls(0.0, float("inf"))

    def seconds(self, nbytes: int) -> float:
        """How long a message of ``nbytes`` is under way."""
        return self.latency + nbytes / self.bytes_per_second
