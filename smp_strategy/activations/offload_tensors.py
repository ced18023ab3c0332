"""Offloaded tensors: parts of storages that move to the host after forward and return before backward.

Autograd saves tensors, but storages occupy the memory, and several tensors may be views of one storage, saved by one or
many nodes of one or many units. So the unit of transfer is an :class:`OffloadedTensor` (a *parcel* in names): the range
of a storage that saved tensors cover, at the version at which they were saved. It is copied out once and back once, and
the saved tensors are rebuilt as views of it. A storage that was changed in place in between is another parcel.

A parcel lives as long as one of its saved tensors. With it goes its memory on the host and on the device, even while
copies are under way: the streams wait for each other, and the host does not.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smp_strategy.distributed.host_copies import HostCopies, StreamEvent
from smp_strategy.distributed.pinned_pool import PinnedBuffer, PinnedPool
from smp_strategy.errors import changed_in_place
from smp_strategy.model.trace.tensor_spec import storage_of

__all__ = ["OffloadedTensor", "OffloadedTensors", "Saved", "storages_of"]

# [Note: memory of offloaded tensors]
#
# Streams order all accesses, so the host never waits. The device memory of a tensor that leaves is held by `_leaving`
# until the computing stream waits for the copy (`Offload._let_go`); only then may the allocator reuse it. A lease of
# host memory carries the event of its last use (`busy_until`), on which the next copy into it depends. Memory loaded
# to belongs to the computing stream; before it is read or freed, that stream waits for the copy (`_await`).

# Ranges begin at the alignment of the allocators: the choice of kernels, and so the last bits of numbers, may depend on
# it.
ALIGNMENT = 512


class _View(NamedTuple):
    """Layout of a tensor in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    begin: int
    """Offset in bytes, as is the end."""
    end: int


@final
class Saved:
    """A tensor saved by autograd.

    Attributes:
        by: Call of the unit during which autograd saved it.
        parcel: Offloaded tensor that contains it, if any.
    """

    __slots__ = ("__weakref__", "_original", "_tensor", "_version", "by", "parcel", "view")

    def __init__(self, tensor: Tensor, by: Any) -> None:
        self.by = by
        self.parcel: OffloadedTensor | None = None
        self.view: _View | None = None
        self._original = weakref.ref(tensor)
        self._version = tensor._version
        # A result must not hold the node that holds it.
        self._tensor: Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, while this object keeps it on the device."""
        return self._tensor

    def pack(self, parcel: "OffloadedTensor", view: _View) -> None:
        self.parcel, self.view = parcel, view

    @property
    def is_unchanged(self) -> bool:
        """Whether it has not been changed in place, as far as is known."""
        return self._tensor is None or self._tensor._version == self._version

    def let_go(self) -> None:
        """Release the device memory, since the copy is on the host.

        A tensor changed meanwhile stays, and reading it is an error.
        """
        if self.is_unchanged:
            self._tensor = None

    def hold_original(self) -> bool:
        """Reuse the original if other code has kept it on the device; whether this has succeeded."""
        original = self._original()
        if self._tensor is None and original is not None and original._version == self._version:
            self._tensor = original.detach()
        return self._tensor is not None

    def read(self) -> Tensor:
        """The tensor.

        Checks the version itself: autograd does so only for tensors that it saves without hooks.
        """
        if self._tensor is None:
            assert self.parcel is not None
            return self.parcel.read(self)
        if not self.is_unchanged:
            raise changed_in_place(self._tensor.shape, self._tensor._version, self._version)
        return self._tensor


@final
class OffloadedTensor:
    """A range of a storage, on the device, on the host, or on its way."""

    def __init__(self, first: Saved, view: _View, copies: HostCopies) -> None:
        assert first.tensor is not None
        # While this weak reference exists, no other storage gets the same key.
        self._storage = StorageWeakRef(first.tensor.untyped_storage())
        self._copies = copies
        self._views: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._begin, self._end = _aligned(view.begin), view.end
        self._lease: PinnedBuffer | None = None
        # Source of a copy to the host that is under way.
        self._leaving: Tensor | None = None
        self._is_gone = self._stays = False
        # The loaded bytes, the event after which they may be read, and the saved tensors they are for.
        self._back: Tensor | None = None
        self._arrival: StreamEvent | None = None
        self._expected: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.add(first, view)

    @property
    def nbytes(self) -> int:
        """Size of the range."""
        return self._end - self._begin

    @property
    def was_sent(self) -> bool:
        """Whether a copy to the host has begun."""
        return self._lease is not None

    def covers(self, view: _View) -> bool:
        """Whether ``view`` can be added: the range contains it, or no copy has begun."""
        return not self.was_sent or (self._begin <= view.begin and view.end <= self._end)

    def add(self, saved: Saved, view: _View) -> None:
        assert self.covers(view)
        self._begin, self._end = min(self._begin, _aligned(view.begin)), max(self._end, view.end)
        saved.pack(self, view)
        self._views.add(saved)
        if self._is_gone:
            saved.let_go()

    def send(self, memory: PinnedPool, after: StreamEvent) -> StreamEvent | None:
        """Begin the copy to the host, unless no saved tensor is left.

        Returns:
            Event after the copy; then call :meth:`let_go`.
        """
        source = next((saved.tensor for saved in self._views), None)
        if source is None:
            return None
        self._lease = lease = memory.lease(self.nbytes)
        earlier = [after] if lease.busy_until is None else [after, lease.busy_until]
        # See [Note: memory of offloaded tensors].
        self._leaving = _bytes_of(source.untyped_storage(), self._begin, self._end)
        lease.busy_until = self._copies.store(self._leaving, lease.memory[: self.nbytes], after=earlier)
        return lease.busy_until

    def let_go(self) -> None:
        """Release the device memory after the copy to the host, unless the tensor is expected on the device."""
        self._leaving = None
        if self._stays:
            return
        self._is_gone = True
        for saved in self._views:
            saved.let_go()

    def expect(self) -> int:
        """Make sure that it will be on the device soon. Returns the number of bytes copied for that."""
        if not self._is_gone:
            self._stays = True
            return 0
        if self._back is not None:
            return 0
        missing = [saved for saved in self._views if not saved.hold_original()]
        if not missing:
            return 0
        assert self._lease is not None
        assert self._lease.busy_until is not None
        stored = self._lease.busy_until
        self._back, self._arrival = self._copies.load(self._lease.memory[: self.nbytes], after=[stored])
        self._lease.busy_until = self._arrival
        self._expected = weakref.WeakSet(missing)
        return self.nbytes

    def read(self, saved: Saved) -> Tensor:
        """The tensor of ``saved``, as a view of the loaded bytes."""
        assert self._back is not None, "what is read must have been expected"
        assert saved.view is not None
        self._await()
        dtype, size, stride, begin, _ = saved.view
        tensor = torch.empty(0, dtype=dtype, device=self._back.device)
        tensor.set_(self._back.untyped_storage(), (begin - self._begin) // dtype.itemsize, size, stride)
        # Freed with the last expected read: a graph retained for another backward loads it from the host again.
        self._expected.discard(saved)
        if not self._expected:
            self._back = None
        return tensor

    def _await(self) -> None:
        if self._arrival is not None:
            self._copies.wait(self._arrival)
            self._arrival = None

    def __del__(self) -> None:
        # The allocator may hand out memory into which a copy is still under way; so computation waits for the copy.
        self._await()


@final
class OffloadedTensors:
    """Registry of the offloaded tensors that are alive.

    Args:
        copies: Copies between the device and the host.
        min_bytes: Storages smaller than this stay on the device.
    """

    def __init__(self, copies: HostCopies, min_bytes: int) -> None:
        self._copies = copies
        self._min_bytes = min_bytes
        self._parcels: weakref.WeakValueDictionary[tuple[int, int], OffloadedTensor] = weakref.WeakValueDictionary()
        self._staying: set[int] = set()

    def keep_here(self, tensors: Iterable[Tensor]) -> None:
        """Set the tensors that stay on the device anyway; nothing that shares their storages is offloaded."""
        self._staying = storages_of(tensors)

    def travels(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` can be rebuilt from bytes and is worth offloading."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.device.type != self._copies.device.type:
            return False
        is_large = tensor.untyped_storage().nbytes() >= self._min_bytes
        return is_large and storage_of(tensor) not in self._staying

    def pack(self, saved: Saved) -> "OffloadedTensor":
        """Assign a saved tensor to a new or existing offloaded tensor."""
        tensor = saved.tensor
        assert tensor is not None
        view = _view_of(tensor)
        key = (storage_of(tensor), tensor._version)
        parcel = self._parcels.get(key)
        if parcel is None or not parcel.covers(view):
            parcel = self._parcels[key] = OffloadedTensor(saved, view, self._copies)
        else:
            parcel.add(saved, view)
        return parcel


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Storages of the plain strided tensors among ``tensors``."""
    return {storage_of(tensor) for tensor in tensors if type(tensor) in _PLAIN and tensor.layout is torch.strided}


_PLAIN = (Tensor, nn.Parameter)


def _aligned(begin: int) -> int:
    return begin // ALIGNMENT * ALIGNMENT


def _view_of(tensor: Tensor) -> _View:
    itemsize, strides = tensor.itemsize, tensor.stride()
    first = int(tensor.storage_offset()) * itemsize
    last = first + sum((int(size) - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) * itemsize
    return _View(tensor.dtype, tensor.shape, strides, first, last + itemsize)


def _bytes_of(storage: torch.UntypedStorage, begin: int, end: int) -> Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, begin, (end - begin,), (1,))
