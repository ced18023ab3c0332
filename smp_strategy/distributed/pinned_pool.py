"""Pool of page-locked host memory, for offloaded tensors.

Memory that a device copies to and from while it computes must be page-locked. Locking takes milliseconds, stops the
device, and PyTorch rounds each allocation up to a power of two. So memory is locked in large *slabs*, which are divided
into buffers of a few sizes. A buffer is leased; when the lease is garbage-collected, the next lease gets it. The device
may still be using it then: the next writer waits for that, on the device and not on the host.

Slabs that were unused for a whole step are returned to the system.
"""

from collections.abc import Callable
from typing import final

from torch import Tensor

from smp_strategy.distributed.host_copies import StreamEvent

__all__ = ["PinnedPool", "PinnedBuffer"]

# Size classes per doubling: a buffer exceeds the request by at most an eighth.
STEPS_PER_DOUBLING = 8
# A slab is a power of two with at least so many buffers, unless it would exceed the largest size.
BUFFERS_PER_SLAB = 8
LARGEST_SLAB = 1 << 28


@final
class _Slab:
    """Memory for buffers of one size."""

    def __init__(self, memory: Tensor, size: int) -> None:
        self.nbytes = memory.numel()
        self.size = size
        self.num_buffers = memory.numel() // size
        self.was_used = True
        # A list, because appending to it is safe in `__del__`, whatever the garbage collector interrupts.
        self.free: list[tuple[Tensor, StreamEvent | None]] = [
            (memory[number * size : (number + 1) * size], None) for number in range(self.num_buffers)
        ]

    @property
    def num_leased(self) -> int:
        return self.num_buffers - len(self.free)


@final
class PinnedBuffer:
    """Lease of a buffer; ends with the life of this object.

    Attributes:
        memory: The buffer, at least as many bytes as requested.
        busy_until: Event after which the device no longer uses it; the holder of the lease updates it.
    """

    def __init__(self, slab: _Slab) -> None:
        slab.was_used = True
        self._slab = slab
        self.memory, self.busy_until = slab.free.pop()

    def __del__(self) -> None:
        self._slab.free.append((self.memory, self.busy_until))


@final
class PinnedPool:
    """Pool of page-locked buffers.

    Attributes:
        most_leased: Peak of leased bytes since it was last set.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._slabs: dict[int, list[_Slab]] = {}
        self.most_leased = 0

    def lease(self, nbytes: int) -> PinnedBuffer:
        """Lease a buffer of at least ``nbytes``."""
        size = _size_class(nbytes)
        slabs = self._slabs.setdefault(size, [])
        slab = next((slab for slab in slabs if slab.free), None)
        if slab is None:
            slab = _Slab(self._allocate(_slab_bytes(size)), size)
            slabs.append(slab)
        found = PinnedBuffer(slab)
        self.most_leased = max(self.most_leased, self.leased)
        return found

    @property
    def leased(self) -> int:
        """Bytes of leased buffers."""
        return sum(slab.num_leased * slab.size for slabs in self._slabs.values() for slab in slabs)

    @property
    def allocated(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab in slabs)

    def trim(self) -> None:
        """Free the slabs from which nothing was leased since the previous call."""
        for size, slabs in list(self._slabs.items()):
            self._slabs[size] = [slab for slab in slabs if slab.num_leased or slab.was_used]
            for slab in slabs:
                slab.was_used = False


def _size_class(nbytes: int) -> int:
    """Smallest buffer size for ``nbytes``."""
    step = max((1 << (nbytes.bit_length() - 1)) // STEPS_PER_DOUBLING, 512)
    return -(-nbytes // step) * step


def _slab_bytes(size: int) -> int:
    wanted = max(size, min(BUFFERS_PER_SLAB * size, LARGEST_SLAB))
    return 1 << (wanted - 1).bit_length()
