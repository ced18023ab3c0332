"""Cost types: counts of a call's kernels, saved bytes by storage, seconds by pass, and the link between stages.

:class:`Effort` counts FLOPs, bytes and kernels, which a device model turns into the seconds of :class:`Work`
(:mod:`~smp_strategy.model.trace.device_model`). Both are split into forward, input gradient and weight gradient, as a
schedule may split them.

:class:`SavedBytes` lists the saved storages one by one, since a recomputed call keeps others: its inputs, and under
``recompute="cheap"`` the results of products, too. Kernels after the last tensor that backward needs do not run again:
the product at the end of a block is never done twice.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

__all__ = ["Effort", "Efforts", "SavedBytes", "Link", "StorageBytes", "Work"]


class Effort(NamedTuple):
    """Kernel costs of one pass."""

    flops: int = 0
    """Floating-point operations of matrix products and convolutions; those of other kernels are negligible."""
    product_bytes: int = 0
    """Bytes that these products read and write."""
    other_bytes: int = 0
    """Bytes that all other kernels read and write."""
    kernels: int = 0
    """Kernel launches."""

    def plus(self, other: "Effort") -> "Effort":
        """Sum of both."""
        return Effort(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Efforts(NamedTuple):
    """Kernel costs of the passes of a call, split like :class:`Work`."""

    forward: Effort = Effort()
    input_gradient: Effort = Effort()
    """Part of backward that earlier calls wait for."""
    weight_gradient: Effort = Effort()
    """Part of backward that only the optimizer waits for."""


class StorageBytes(NamedTuple):
    """Size of one storage, however many tensors share it."""

    nbytes: int
    origin: Literal["input", "product", "other"]
    """``input``: existed before the call. ``product``: result of a matrix product, a convolution or an attention."""
    is_saved: bool = True
    """Whether backward needs it; otherwise only a recomputation does."""


class SavedBytes(NamedTuple):
    """Storages of one call that backward or a recomputation needs."""

    memories: tuple[StorageBytes, ...] = ()
    again: Effort = Effort()
    """Cost to recompute all of them from the inputs."""
    cheap: Effort = Effort()
    """Part of that cost that is no product."""
    working_bytes: int = 0
    """Bytes beside the saved ones, when forward or backward is fullest."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that backward needs."""
        return sum(memory.nbytes for memory in self.memories if memory.is_saved)

    def nbytes(self, *, origins: Iterable[str], saved_only: bool = False) -> int:
        """Bytes of the storages of some origins."""
        wanted = set(origins)
        return sum(
            memory.nbytes for memory in self.memories if memory.origin in wanted and memory.is_saved >= saved_only
        )


class Work(NamedTuple):
    """Seconds of one call, or of several that run together."""

    forward: float = 0.0
    input_gradient: float = 0.0
    """Part of backward that earlier stages wait for."""
    weight_gradient: float = 0.0
    """Part of backward that only the optimizer waits for (Zero Bubble, arXiv:2401.10241)."""

    @property
    def backward(self) -> float:
        """Seconds of both parts."""
        return self.input_gradient + self.weight_gradient

    def scaled(self, factor: float) -> "Work":
        """All seconds times ``factor``."""
        return Work(*(factor * seconds for seconds in self))

    def plus(self, other: "Work") -> "Work":
        """Sum of both."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Link(NamedTuple):
    """Connection between two stages."""

    latency: float
    """Seconds until the first byte of a message arrives."""
    bytes_per_second: float

    @classmethod
    def instant(cls) -> Self:
        """A link whose messages take no time."""
        return cls(0.0, float("inf"))

    def seconds(self, nbytes: int) -> float:
        """Seconds until a message of ``nbytes`` has arrived."""
        return self.latency + nbytes / self.bytes_per_second
