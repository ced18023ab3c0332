"""Broadcast a full state dict from rank 0 to all ranks, with one copy per machine in shared memory.

Scripts write the result of ``model.state_dict()`` on all ranks, as under DistributedDataParallel, and the last writer
wins. So all ranks need the same contents. A copy for each would take the memory of the model times the ranks of a
machine. Instead the first rank of a machine writes the tensors to a file in shared memory, which the others map
copy-on-write. The file has no name, where the system knows such files, so that its memory is freed with the last
tensor, or with the last process, however that ends. Else it is unlinked before they return.
"""

import os
import platform
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rendezvous import alike

__all__ = ["on_every_rank", "sent_to_writers", "storage_of"]

_NAMELESS: Final = Path("/proc/self/fd")
_ALIGNMENT: Final = 64


class _Slot(NamedTuple):
    """Location of a tensor in the file."""

    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize


def on_every_rank(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` on all ranks, with its tensors in host memory. A tensor under several names stays a single one.

    Collective.

    Args:
        state: full state on global rank 0; empty on the others.
    """
    if dist.get_world_size() == 1:
        return state
    rank = dist.get_rank()
    nodes = collectives.gather_objects(_machine(), "who shares a machine")
    leader = nodes.index(nodes[rank])
    state = sent_to_writers(state, writes=rank == leader)
    mine: tuple[Any, ...] | None = None
    room = _Room()
    with alike("sharing a state with the ranks of a machine"):
        if rank == leader:
            mine = (*_written(state, room), getattr(state, "_metadata", None))
    told = collectives.gather_objects(mine, "a state that the ranks of a machine share")[leader]
    assert told is not None
    layout, path, metadata = told
    try:
        with alike("reading a state that another rank of the machine shares"):
            found = _mapped(layout, path)
    finally:
        room.close()
    if metadata is None:
        return found
    ordered = OrderedDict(found)
    ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def _written(state: Mapping[str, Any], room: "_Room") -> tuple[Any, str]:
    """Write the tensors of ``state`` to ``room``; return ``state`` with slots in their place, and the path."""
    slots: dict[Any, tuple[_Slot, Tensor]] = {}
    end = 0

    def slot_of(leaf: Any) -> Any:
        nonlocal end
        if not isinstance(leaf, Tensor):
            return leaf
        key = storage_of(leaf), leaf.dtype
        if key not in slots:
            dense = torch.empty_like(leaf, device="meta")
            slot = _Slot(end, tuple(leaf.shape), dense.stride(), leaf.dtype)
            slots[key] = slot, leaf
            end += -(-slot.nbytes // _ALIGNMENT) * _ALIGNMENT
        return slots[key][0]

    layout = pytree.tree_map(slot_of, dict(state))
    try:
        path = room.opened(max(end, 1))
        memory = np.memmap(path, dtype=np.uint8, mode="r+")
        for slot, tensor in slots.values():
            _view(memory, slot).copy_(tensor.detach())
    except BaseException:
        room.close()
        raise
    return layout, path


class _Room:
    """A file in shared memory, or on disk where there is no room for it."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._path: str | None = None

    def opened(self, num_bytes: int) -> str:
        """Create it with that size; the path by which processes of this machine open it until :meth:`close`."""
        if _NAMELESS.is_dir() and hasattr(os, "memfd_create"):
            self._number = os.memfd_create("smp-state")
            try:
                os.posix_fallocate(self._number, 0, num_bytes)
                return str(Path(f"/proc/{os.getpid()}/fd/{self._number}"))
            except OSError:
                self.close()
        self._number, self._path = tempfile.mkstemp(prefix="smp-state-")
        os.posix_fallocate(self._number, 0, num_bytes)
        return self._path

    def close(self) -> None:
        """Let it end with its last user."""
        if self._number is not None:
            os.close(self._number)
        if self._path is not None:
            os.unlink(self._path)
        self._number = self._path = None


def _machine() -> tuple[str, str]:
    """Key of processes that can open files of each other."""
    return platform.node(), os.readlink("/proc/self/ns/pid") if _NAMELESS.is_dir() else ""


def _mapped(layout: Any, path: str) -> dict[str, Any]:
    memory = np.memmap(path, dtype=np.uint8, mode="c")
    views: dict[_Slot, Tensor] = {}

    def tensor_of(leaf: Any) -> Any:
        return views.setdefault(leaf, _view(memory, leaf)) if isinstance(leaf, _Slot) else leaf

    found: dict[str, Any] = pytree.tree_map(tensor_of, layout, is_leaf=lambda leaf: isinstance(leaf, _Slot))
    return found


def _view(memory: "np.memmap[Any, Any]", slot: _Slot) -> Tensor:
    """Tensor view of ``slot``, with a storage of its own, as files and safetensors expect it."""
    if not slot.nbytes:
        return torch.empty(slot.size, dtype=slot.dtype)
    run = torch.from_numpy(memory[slot.start : slot.start + slot.nbytes])
    return run.view(slot.dtype).as_strided(slot.size, slot.stride)


def sent_to_writers(state: dict[str, Any], *, writes: bool) -> dict[str, Any]:
    """Send ``state`` from global rank 0 to all ranks that write; other ranks keep their argument. Collective."""
    flags = collectives.gather_objects(writes, "who writes")
    rank = dist.get_rank()
    for writer in (each for each, flag in enumerate(flags) if flag and each != 0):
        if rank == 0:
            collectives.send_object(state, writer, "a state that is written on each node")
        elif rank == writer:
            state = collectives.receive_object(0, "a state that is written on each node")
    return state


def storage_of(tensor: Tensor) -> Any:
    """Key by which safetensors considers tensors shared: the same object, or the same memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
