"""What a call has a device do, in counts: what a model of the device turns into seconds (:mod:`.machine`)."""

from typing import NamedTuple

__all__ = ["Effort", "Efforts"]


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
    """What the passes of a call have a device do, split like :class:`~smp_strategy.model.trace.work_trace.Work`."""

    forward: Effort = Effort()
    input_gradient: Effort = Effort()
    """The part of backward that the makers of the call's inputs wait for."""
    weight_gradient: Effort = Effort()
    """The part of backward that nobody waits for but the optimizer."""
