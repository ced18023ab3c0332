"""Shared memory between processes of one machine, for messages that are copied once and for sums.

A rank owns an *arena*, an anonymous file in memory (``memfd_create``) that it and its peers map. It copies a message
into a block of the arena and tells its readers where that is, by other means. They read the block in place. A reader
that has no more use for the memory sets its *flag* of the block, a byte in the file. When all readers have, the owner
may use the block again. No side ever waits for the other::

    0            the key, by which a peer knows that it has opened the right file
    FLAGS        a byte for each granule; those from the start of a block on belong to its readers: 1 if given back
    data         blocks, of at least one granule for each reader

The file has no name, so nothing of it is left when the processes have ended, however they end. It is as large as the
machine's memory, but takes only what is written to: at most the messages that are alive at one time.

A process opens a peer's file through ``/proc``. That fails on another machine, in another container and for another
user, and the ranks then agree not to use it (:func:`open_arenas`).
"""

import ctypes
import mmap
import os
import secrets
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple, final
from weakref import finalize

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.peer_processes import process_space
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.errors import SMPError

__all__ = ["FirstFit", "Arena", "ArenaAddress", "PeerArena", "open_arenas", "tensor_in"]


# --- first fit -------------------------------------------------------------------------------------------------------
# First-fit allocation: the lowest gap that is large enough (pure).
#
# Low addresses are used again first. So what lies above the highest block of a step is not needed, and can be given
# back to the system, whatever the sizes of the blocks are.


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


# --- arena -----------------------------------------------------------------------------------------------------------


GRANULE: Final = max(1 << 14, mmap.PAGESIZE)
"""Alignment of blocks in bytes, a multiple of the page size."""
STEPS_KEPT: Final = 16
"""Memory that some of that many last steps have used stays: steps of training and evaluation may alternate, and the
system takes longer to provide memory than a copy takes."""
_KEY_BYTES: Final = 16
_FLAGS: Final = GRANULE


class ArenaAddress(NamedTuple):
    """Where a peer finds an arena."""

    system: str
    """Identity of the running kernel and of the namespace of process numbers."""
    process: int
    """Number of the owner's process."""
    descriptor: int
    """Number of the open file in that process."""
    key: bytes
    """First bytes of the file."""
    capacity: int
    """Number of bytes for blocks."""


@final
class Arena:
    """Blocks of memory that peers read; any thread may allocate them.

    Args:
        capacity: Most bytes in blocks; ``None``: as many as the machine has memory.

    Raises:
        OSError: the system offers no such memory.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no anonymous files in memory")
        capacity = _memory_of_machine() if capacity is None else -(-capacity // GRANULE) * GRANULE
        key = secrets.token_bytes(_KEY_BYTES)
        self._descriptor: int | None = os.memfd_create("smp_messages")
        try:
            os.ftruncate(self._descriptor, _data_of(capacity) + capacity)
            os.pwrite(self._descriptor, key, 0)
            self._memory = mmap.mmap(self._descriptor, 0)
        except (OSError, ValueError) as error:
            self.stop_sharing()
            raise OSError(str(error)) from error
        self.address = ArenaAddress(process_space(), os.getpid(), self._descriptor, key, capacity)
        self._first = _data_of(capacity)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._blocks = FirstFit(capacity, GRANULE)
        self._readers: dict[int, int] = {}
        self._lock = threading.Lock()
        # End of what has been written to and not been given back to the system.
        self._touched = 0
        self._needed: deque[int] = deque(maxlen=STEPS_KEPT)

    @property
    def live_blocks(self) -> int:
        """Number of blocks that have not been given back."""
        self._reclaim()
        return len(self._blocks.starts)

    def allocate(self, nbytes: int, readers: int = 1) -> int:
        """Allocate a block.

        Args:
            nbytes: Its size.
            readers: Number of ranks that take it, this one among them if it does.

        Returns:
            Its start.

        Raises:
            SMPError: there is no gap of that size.
        """
        with self._lock:
            self._reclaim()
            start = self._blocks.take(max(nbytes, readers * GRANULE))
            if start is None:
                raise SMPError(
                    f"The {self.address.capacity} bytes of shared memory are full. Set `stage_transport=gloo` and "
                    "`ddp_reduction=flat`, or keep fewer tensors of other stages."
                )
            self._touched = max(self._touched, self._blocks.peak)
            self._readers[start] = readers
            flags = _FLAGS + start // GRANULE
            self._memory[flags : flags + readers] = bytes(readers)
        return start

    def view(self, start: int, nbytes: int) -> Tensor:
        """Bytes of the block that begins at ``start``, for this rank to write to."""
        first = self._first + start
        return self._bytes[first : first + nbytes]

    def put(self, tensor: Tensor, strides: tuple[int, ...]) -> int:
        """Copy ``tensor`` into a new block, for one reader.

        Args:
            tensor: Tensor of the host.
            strides: Strides without gaps that it gets.

        Returns:
            Start of the block.

        Raises:
            SMPError: as :meth:`allocate`.
        """
        start = self.allocate(tensor.nbytes)
        first = self._first + start
        source = tensor.data_ptr()  # 0: a tensor of zeros that has no memory
        if source and tensor.stride() == strides and not (tensor.is_conj() or tensor.is_neg()):
            # Past the caches if it is large, which a copy of torch's is not; other threads run meanwhile.
            ctypes.memmove(self._bytes.data_ptr() + first, source, tensor.nbytes)
        else:
            block = torch.empty(0, dtype=tensor.dtype, device="cpu")
            block.set_(self._bytes.untyped_storage(), first // tensor.itemsize, tensor.shape, strides)
            block.copy_(tensor)
        return start

    def take(self, start: int, nbytes: int, reader: int = 0) -> torch.UntypedStorage:
        """As :meth:`PeerArena.take`, if this rank is among the readers of its own block."""
        return _taken(self._memory, self._first + start, nbytes, _FLAGS + start // GRANULE + reader)

    def trim(self) -> None:
        """End a step: give the system back what the last :data:`STEPS_KEPT` steps with new blocks have not needed."""
        with self._lock:
            if self._blocks.peak:
                self._reclaim()
                self._needed.append(max(self._blocks.peak, self._blocks.end))
                self._drop(max(self._needed), self._touched)
                self._touched, self._blocks.peak = max(self._needed), 0

    def stop_sharing(self) -> None:
        """Close the file for peers that have not opened it; those that have keep it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Give the system back all that peers do not hold. There must be no new blocks afterwards."""
        self.stop_sharing()
        self._reclaim()
        for begin, end in self._blocks.gaps(self._touched):
            self._drop(begin, end)
        self._touched = self._blocks.end

    def _reclaim(self) -> None:
        """Free the blocks that peers have given back."""
        for start in self._blocks.starts:
            flags, readers = _FLAGS + start // GRANULE, self._readers[start]
            if all(self._memory[flags : flags + readers]):
                self._blocks.give_back(start)
                del self._readers[start]

    def _drop(self, begin: int, end: int) -> None:
        if begin < end:
            with suppress(OSError):  # then it stays until the end
                self._memory.madvise(mmap.MADV_REMOVE, self._first + begin, end - begin)


@final
class PeerArena:
    """Arena of another rank.

    Raises:
        OSError: it is out of reach.
    """

    def __init__(self, address: ArenaAddress) -> None:
        if address.system != process_space():
            raise OSError("on another machine, or in another container")
        path = f"/proc/{address.process}/fd/{address.descriptor}"
        # Should the path lead elsewhere, opening it must not block.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            if os.pread(descriptor, _KEY_BYTES, 0) != address.key:
                raise OSError(f"{path} is another file")
            self._memory = mmap.mmap(descriptor, _data_of(address.capacity) + address.capacity)
        except ValueError as error:
            raise OSError(str(error)) from error
        finally:
            os.close(descriptor)
        self._first = _data_of(address.capacity)

    def take(self, start: int, nbytes: int, reader: int = 0) -> torch.UntypedStorage:
        """Memory of the block that begins at ``start``; it is given back when nobody holds this any more."""
        return _taken(self._memory, self._first + start, nbytes, _FLAGS + start // GRANULE + reader)

    def peek(self, start: int, nbytes: int) -> torch.UntypedStorage:
        """Memory of the block that begins at ``start``, which its owner keeps for as long as it is needed here."""
        return torch.from_numpy(_bytes_at(self._memory, self._first + start, nbytes)).untyped_storage()


def open_arenas(
    group: dist.ProcessGroup,
) -> tuple[Arena | None, Mapping[int, PeerArena], Mapping[tuple[int, int], str]]:
    """Make an arena, and open those of the other ranks of ``group``. Collective over it.

    Returns:
        * The arena of this rank; ``None``: no peer reads it.
        * The arenas of peers that can open this rank's as well, by global rank.
        * Why others cannot use each other's, by pairs of global ranks; the same on all ranks.
    """
    arena, failure = None, ""
    try:
        arena = Arena()
    except OSError as error:
        failure = str(error)
    rank, doing = dist.get_rank(), "an attempt to share memory"
    addresses = dict(collectives.gather_objects((rank, arena and arena.address), doing, group))
    found: dict[int, PeerArena] = {}
    reasons: dict[int, str] = {}
    for peer, address in addresses.items():
        if peer == rank:
            continue
        try:
            if address is None or arena is None:
                raise OSError(failure or "there is no such memory")
            found[peer] = PeerArena(address)
        except OSError as error:
            reasons[peer] = str(error)
    failures = {
        (min(one, other), max(one, other)): reason
        for one, told in collectives.gather_objects((rank, reasons), doing, group)
        for other, reason in told.items()
    }
    usable = {peer: each for peer, each in found.items() if (min(rank, peer), max(rank, peer)) not in failures}
    if arena is not None:
        arena.stop_sharing()  # all who could have opened it
    return (arena if usable else None), usable, failures


def tensor_in(memory: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Tensor of one dimension in ``memory``, usable in and outside of inference mode."""
    with outside_inference_mode():
        return torch.empty(0, dtype=dtype, device="cpu").set_(memory)


def _taken(memory: mmap.mmap, first: int, nbytes: int, flag: int) -> torch.UntypedStorage:
    seen = _bytes_at(memory, first, nbytes)
    # The storage holds the array and the array the mapping. In a forked process the arrays are copies, whose end says
    # nothing.
    finalize(seen, _give_back, memory, flag, os.getpid()).atexit = False
    return torch.from_numpy(seen).untyped_storage()


def _bytes_at(memory: mmap.mmap, first: int, nbytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=first)


def _give_back(memory: mmap.mmap, flag: int, process: int) -> None:
    if os.getpid() == process:
        memory[flag] = 1


def _data_of(capacity: int) -> int:
    """Offset of the blocks in the file."""
    return _FLAGS + -(-(capacity // GRANULE) // GRANULE) * GRANULE


def _memory_of_machine() -> int:
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return -(-nbytes // GRANULE) * GRANULE
