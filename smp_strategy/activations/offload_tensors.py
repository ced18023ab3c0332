"""What a unit has saved for backward, on its way to the host and back.

Autograd saves tensors; what takes memory are the storages that they are views of. Several tensors may be views of one
storage, saved by one node or by many, in one unit or in many. So what travels is a *parcel*: the part of a storage that
saved tensors cover, in the state in which they were saved. It goes out once, comes back once, and the tensors are made
anew as views of it. A storage that was changed in place in between is another parcel.

A parcel lives as long as one of its tensors is saved. With it go its memory on the host and on the device, also while
copies are under way: the streams wait for each other, and nobody else.
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

# Parcels begin at addresses of which allocators make all memory begin: which kernels run, and so the last bits of
# numbers, may depend on that.
ALIGNMENT = 512


class _View(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    begin: int
    """In bytes, as the following."""
    end: int


@final
class Saved:
    """A tensor that autograd has saved.

    Attributes:
        by: the call of a unit that has made autograd save it.
        parcel: which it travels in, if it does.
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
        """It, while it is on the device for this."""
        return self._tensor

    def pack(self, parcel: "OffloadedTensor", view: _View) -> None:
        """It travels in ``parcel``."""
        self.parcel, self.view = parcel, view

    @property
    def is_unchanged(self) -> bool:
        """Whether it is what it was, as far as is known."""
        return self._tensor is None or self._tensor._version == self._version

    def let_go(self) -> None:
        """It is on the host. One that has been changed meanwhile stays, and is an error when it is read."""
        if self.is_unchanged:
            self._tensor = None

    def hold_original(self) -> bool:
        """Take it back, if somebody else has kept it on the device all the time."""
        original = self._original()
        if self._tensor is None and original is not None and original._version == self._version:
            self._tensor = original.detach()
        return self._tensor is not None

    def read(self) -> Tensor:
        """It; autograd's check that it is unchanged is made for tensors that it saves itself only."""
        if self._tensor is None:
            assert self.parcel is not None
            return self.parcel.read(self)
        if not self.is_unchanged:
            raise changed_in_place(self._tensor.shape, self._tensor._version, self._version)
        return self._tensor


@final
class OffloadedTensor:
    """See the module docstring."""

    def __init__(self, first: Saved, view: _View, copies: HostCopies) -> None:
        assert first.tensor is not None
        # As long as this weak reference is there, no other storage gets the same key.
        self._storage = StorageWeakRef(first.tensor.untyped_storage())
        self._copies = copies
        self._views: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._begin, self._end = _aligned(view.begin), view.end
        self._lease: PinnedBuffer | None = None
        # What is being copied to the host.
        self._leaving: Tensor | None = None
        self._is_gone = self._stays = False
        # What has come back, when it may be read, and whom it is for.
        self._back: Tensor | None = None
        self._arrival: StreamEvent | None = None
        self._expected: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.add(first, view)

    @property
    def nbytes(self) -> int:
        """What travels."""
        return self._end - self._begin

    @property
    def was_sent(self) -> bool:
        """Whether a copy to the host has begun."""
        return self._lease is not None

    def covers(self, view: _View) -> bool:
        """Whether ``view`` can be added: all of it travels, or nothing has left yet."""
        return not self.was_sent or (self._begin <= view.begin and view.end <= self._end)

    def add(self, saved: Saved, view: _View) -> None:
        """Another tensor that travels."""
        assert self.covers(view)
        self._begin, self._end = min(self._begin, _aligned(view.begin)), max(self._end, view.end)
        saved.pack(self, view)
        self._views.add(saved)
        if self._is_gone:
            saved.let_go()

    def send(self, memory: PinnedPool, after: StreamEvent) -> StreamEvent | None:
        """Begin to copy it to the host, unless nobody needs it any more.

        Returns:
            When that is done: then :meth:`let_go`.
        """
        source = next((saved.tensor for saved in self._views), None)
        if source is None:
            return None
        self._lease = lease = memory.lease(self.nbytes)
        earlier = [after] if lease.busy_until is None else [after, lease.busy_until]
        self._leaving = _bytes_of(source.untyped_storage(), self._begin, self._end)
        lease.busy_until = self._copies.store(self._leaving, lease.memory[: self.nbytes], after=earlier)
        return lease.busy_until

    def let_go(self) -> None:
        """It is on the host, so that nothing of it has to be kept on the device, unless it is expected there."""
        self._leaving = None
        if self._stays:
            return
        self._is_gone = True
        for saved in self._views:
            saved.let_go()

    def expect(self) -> int:
        """See to it that it is on the device soon. Returns how many bytes are copied for that."""
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
        """The tensor that ``saved`` stands for, as a view of what has come back."""
        assert self._back is not None, "what is read must have been expected"
        assert saved.view is not None
        self._await()
        dtype, size, stride, begin, _ = saved.view
        tensor = torch.empty(0, dtype=dtype, device=self._back.device)
        tensor.set_(self._back.untyped_storage(), (begin - self._begin) // dtype.itemsize, size, stride)
        # The last one takes it away: a graph that is kept for another backward gets it from the host again.
        self._expected.discard(saved)
        if not self._expected:
            self._back = None
        return tensor

    def _await(self) -> None:
        if self._arrival is not None:
            self._copies.wait(self._arrival)
            self._arrival = None

    def __del__(self) -> None:
        # What comes after may get the memory into which a copy is under way.
        self._await()


@final
class OffloadedTensors:
    """Those that are alive.

    Args:
        copies: carry them.
        min_bytes: smaller storages stay where they are.
    """

    def __init__(self, copies: HostCopies, min_bytes: int) -> None:
        self._copies = copies
        self._min_bytes = min_bytes
        self._parcels: weakref.WeakValueDictionary[tuple[int, int], OffloadedTensor] = weakref.WeakValueDictionary()
        self._staying: set[int] = set()

    def keep_here(self, tensors: Iterable[Tensor]) -> None:
        """From now on these, which are on the device anyway, and all that shares their memory, do not travel."""
        self._staying = storages_of(tensors)

    def travels(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` can be made anew from bytes, and is worth it."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.device.type != self._copies.device.type:
            return False
        is_large = tensor.untyped_storage().nbytes() >= self._min_bytes
        return is_large and storage_of(tensor) not in self._staying

    def pack(self, saved: Saved) -> "OffloadedTensor":
        """Put a tensor into its parcel, which may be another one's already."""
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
    """Storages of those that have one."""
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
