"""Asynchronous save: a thread writes one checkpoint at a time, and every error is raised in the main thread.

Actions that must not happen before the checkpoint is complete, such as deleting the previous one, run in the same
thread afterwards, and not at all if the checkpoint has failed. An error is raised at the main thread's next call: at
the next step, the next save, the end. Python waits for the thread before it exits, and an error that nobody has asked
for is printed then.

[Note: order of background saves] Ranks that write together write in the same order, since each of them waits for its
own save before it begins the next one, and nothing else depends on which rank is ready first. An error is raised on the
rank that has it. Ranks that wait for that rank learn of it as of any other rank that fails.

Staging buffers: host memory into which tensors are copied before a thread writes them to disk.

The system fills fresh memory with zeros, page by page, which takes longer than the copy itself; so buffers are kept
from one save to the next.
"""

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.background_call import BackgroundCall
from smp_strategy.distributed.deadlock import beside
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.host_copies import HostCopies
from smp_strategy.errors import CheckpointError, cause_of

__all__ = ["BackgroundSave", "StagingBuffers", "in_host_memory", "raw"]


@final
class BackgroundSave:
    """Queue of one save and the actions behind it. All methods are for a single thread, usually the main one."""

    def __init__(self) -> None:
        self._work: _BackgroundWork | None = None
        self._errors: list[BaseException] = []
        weakref.finalize(self, _tell, self._errors)

    @property
    def is_busy(self) -> bool:
        """Whether a save was started whose outcome :meth:`check` or :meth:`wait` has not reported yet."""
        return self._work is not None

    def start(self, write: Callable[[], None], what: str = "The checkpoint") -> None:
        """Wait for the previous save, then call ``write`` in a thread.

        Args:
            write: Writes the checkpoint; nothing else may change the values that it writes.
            what: Name of the checkpoint for messages: a path.

        Raises:
            Exception: the error of the previous save; then nothing is started.
        """
        self.wait()
        self._work = _BackgroundWork(write, what, self._errors)

    def after(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the save and earlier actions are done: in the thread, or at once if they are done
        already.

        It is not called if the save, or an action before this one, fails.
        """
        if self._work is not None and self._work.add(action):
            return
        if not self._errors:
            action()

    def check(self) -> None:
        """Raise the error of the save, if there is one, once. Does not wait.

        Raises:
            CheckpointError: the checkpoint was not saved.
            Exception: of an action behind it.
        """
        if self._work is not None and self._work.is_over:
            self.wait()

    def wait(self) -> None:
        """Wait until the save and all actions are done.

        Raises:
            CheckpointError: the checkpoint was not saved.
            Exception: of an action behind it.
        """
        if self._work is None:
            return
        self._work.call.within(None)
        self._work = None
        if self._errors:
            raise self._errors.pop()


@final
class _BackgroundWork:
    """One save, in a thread. Has no reference to its :class:`BackgroundSave`, which may be collected first."""

    def __init__(self, write: Callable[[], None], what: str, errors: list[BaseException]) -> None:
        self.is_over = False
        self._errors = errors
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.call = BackgroundCall(partial(self._run, write, what), is_awaited=True)

    def add(self, action: Callable[[], None]) -> bool:
        """Queue ``action``; returns whether it will run, if nothing fails before."""
        with self._lock:
            if not self.is_over:
                self._waiting.append(action)
            return not self.is_over

    def _run(self, write: Callable[[], None], what: str) -> None:
        try:
            with beside():
                write()
        except BaseException as error:
            told = str(error) if isinstance(error, CheckpointError) else cause_of(error)
            failure = CheckpointError(told if told.startswith(what) else f"{what} was not saved: {told}")
            failure.__cause__ = error
            self._errors.append(failure)
        while (action := self._next()) is not None:
            try:
                action()
            except BaseException as error:
                self._errors.append(error)

    def _next(self) -> Callable[[], None] | None:
        # One lock for the last action and `is_over`: an action added in between would never run.
        with self._lock:
            if self._waiting and not self._errors:
                return self._waiting.pop(0)
            self._waiting.clear()
            self.is_over = True
            return None


def _tell(errors: list[BaseException]) -> None:
    for error in errors:
        print(f"smp_strategy: {type(error).__name__}: {error}", file=sys.stderr)


_ALIGNMENT: Final = 64  # bytes


@final
class StagingBuffers:
    """Host memory for copies of tensors of given shapes.

    Args:
        like: Tensors of these shapes and dtypes. If one is on an accelerator, the memory is page-locked where possible.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        starts, size = [], 0
        for tensor in like:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._links: dict[torch.device, HostCopies] = {}
        self._connect(like)
        memory = _memory(size, self._links)
        self._copies = [
            torch.from_numpy(memory[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` have the shapes and dtypes of these buffers."""
        return len(tensors) == len(self._copies) and all(
            copy.shape == tensor.shape and copy.dtype == tensor.dtype
            for copy, tensor in zip(self._copies, tensors, strict=True)
        )

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the values of tensors, and wait for the copies; the tensors may be changed afterwards."""
        self._connect(tensors)
        under_way = []
        # torch's own copy reads what it overwrites, the C library's does not; but torch's may use several threads.
        alone = torch.get_num_threads() == 1
        for copy, tensor in zip(self._copies, tensors, strict=True):
            if alone and _is_plain(tensor):
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            else:
                link = self._links[tensor.device]
                under_way.append(link.store(tensor, copy, after=[link.now()]))
        for copied in under_way:
            copied.synchronize()
        return self._copies

    def _connect(self, tensors: Sequence[Tensor]) -> None:
        for device in {tensor.device for tensor in tensors} - self._links.keys():
            self._links[device] = HostCopies(device)


def in_host_memory(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous in host memory, else a copy that is."""
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else tensor.cpu().resolve_conj().resolve_neg().contiguous()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that is contiguous in host memory, to be read or written."""
    if not tensor.nbytes:
        return memoryview(b"")
    # By address: a storage that numpy has seen cannot be resized to 0 any more, which shards need.
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # keeps the memory alive as long as the view
    return memoryview(array).cast("B")


def _is_plain(tensor: Tensor) -> bool:
    return is_host(tensor.device) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _memory(size: int, links: Mapping[torch.device, HostCopies]) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    accelerator = next((link for device, link in links.items() if not is_host(device)), None)
    if accelerator is not None:
        try:
            return accelerator.memory(size).numpy()
        except RuntimeError:  # not so much memory can be page-locked; the copy takes longer then
            pass
    return np.empty(size, dtype=np.uint8)
