"""Where tensors wait on the host: memory that is used again and again.

Memory that a device copies to and from while it computes must be pinned. That takes milliseconds, stops the device, and
PyTorch rounds every piece of it up to a power of two. So memory is pinned in large *slabs*, which are cut into buffers
of a few sizes. A buffer is leased; when its lease is gone, whatever the reason, the next one gets it. The device may
still be at work on it then: whoever writes next waits for that, on the device and not on the host.

Slabs that nobody has used for a whole step are given back to the system.
"""

from collections.abc import Callable
from typing import final

from torch import Tensor

from smp_strategy.distributed.host_copies import StreamEvent

__all__ = ["PinnedPool", "PinnedBuffer"]

# At most an eighth of a buffer is more than was asked for.
STEPS_PER_DOUBLING = 8
# A slab is a power of two: with so many buffers at least, unless it would be larger than this.
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
        # A list, because appending to it is safe wherever the garbage collector runs.
        self.free: list[tuple[Tensor, StreamEvent | None]] = [
            (memory[number * size : (number + 1) * size], None) for number in range(self.num_buffers)
        ]

    @property
    def num_leased(self) -> int:
        return self.num_buffers - len(self.free)


@final
class PinnedBuffer:
    """A buffer, for as long as this object lives.

    Attributes:
        memory: the buffer; at least as many bytes as asked for.
        busy_until: what the device does with it is done then; to be kept up to date by who has the lease.
    """

    def __init__(self, slab: _Slab) -> None:
        slab.was_used = True
        self._slab = slab
        self.memory, self.busy_until = slab.free.pop()

    def __del__(self) -> None:
        self._slab.free.append((self.memory, self.busy_until))


@final
class PinnedPool:
    """See the module docstring.

    Args:
        allocate: makes memory of so many bytes.

    Attributes:
        most_leased: the highest number of bytes leased at once since it was last set.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._slabs: dict[int, list[_Slab]] = {}
        self.most_leased = 0

    def lease(self, nbytes: int) -> PinnedBuffer:
        """A buffer of at least ``nbytes``."""
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
        """Bytes of buffers that are in use."""
        return sum(slab.num_leased * slab.size for slabs in self._slabs.values() for slab in slabs)

    @property
    def allocated(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab in slabs)

    def trim(self) -> None:
        """Let go of the slabs from which nothing was leased since this was last called."""
        for size, slabs in list(self._slabs.items()):
            self._slabs[size] = [slab for slab in slabs if slab.num_leased or slab.was_used]
            for slab in slabs:
                slab.was_used = False


def _size_class(nbytes: int) -> int:
    """The smallest size of a buffer for ``nbytes``."""
    step = max((1 << (nbytes.bit_length() - 1)) // STEPS_PER_DOUBLING, 512)
    return -(-nbytes // step) * step


def _slab_bytes(size: int) -> int:
    wanted = max(size, min(BUFFERS_PER_SLAB * size, LARGEST_SLAB))
    return 1 << (wanted - 1).bit_length()
