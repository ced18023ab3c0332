"""Broadcast a full state dict from rank 0 to all ranks, with one copy per machine in shared memory.

Scripts write the result of ``model.state_dict()`` on all ranks, as under DistributedDataParallel, and the last writer
wins. So all ranks need the same contents. A copy for each would take the memory of the model times the ranks of a
machine. Instead the first rank of a machine writes the state to a file in shared memory by ``torch.save``, and all of
them load it mapped, copy-on-write. The file has no name, where the system knows such files, so that its memory is freed
with the last tensor, or with the last process, however that ends. Else it is unlinked before they return.
"""

import copy
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.torch_file import without_checksums
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rendezvous import alike

__all__ = ["on_every_rank", "sent_to_writers", "snapshot", "storage_of"]

_NAMELESS: Final = Path("/proc/self/fd")
_DESCRIPTION: Final = 1 << 20  # bytes


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
    room, path = _Room(), None
    with alike("sharing a state with the ranks of a machine"):
        if rank == leader:
            path = room.written(state)
    path = collectives.gather_objects(path, "a state that the ranks of a machine share")[leader]
    assert path is not None
    try:
        with alike("reading a state that another rank of the machine shares"):
            # Written by a rank of this run, so it may have anything.
            found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    finally:
        room.close()
    return found


class _Room:
    """A file in shared memory, or on disk where there is no room for it."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._path: str | None = None

    def written(self, state: Mapping[str, Any]) -> str:
        """Write ``state`` to it; the path by which processes of this machine open it until :meth:`close`."""
        try:
            # Views of larger memory get memory of their own, which files and safetensors expect.
            dense = snapshot(state, lambda tensor: tensor.untyped_storage().nbytes() == tensor.nbytes)
            path = self._opened(sum(leaf.nbytes for leaf in pytree.tree_leaves(dense) if isinstance(leaf, Tensor)))
            with open(path, "r+b") as file, without_checksums():
                torch.save(dense, file)
                file.truncate()
        except BaseException:
            self.close()
            raise
        return path

    def _opened(self, num_bytes: int) -> str:
        """Create it, with room for tensors of that size and for what describes them."""
        num_bytes += _DESCRIPTION
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


def snapshot(tree: Any, is_fresh: Callable[[Tensor], bool] = lambda tensor: False) -> Any:
    """A copy in host memory, unaffected by further training.

    Args:
        tree: Nested content of a checkpoint. A tensor under several names (tied weights) is a single one in the copy.
        is_fresh: Whether a tensor is such a copy already.
    """
    memo: dict[int, Any] = {}
    copies: dict[Any, Tensor] = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            key = storage_of(leaf), leaf.dtype
            if key not in copies:
                copies[key] = leaf if is_fresh(leaf) else leaf.detach().to("cpu", copy=True)
            memo[id(leaf)] = copies[key]
    return copy.deepcopy(tree, memo)
