"""How many bytes of tensors are alive at most while something runs?

Allocators do not say whose memory it is, and a profiler misses what other threads free. So every operation is looked
at, as ``torch.distributed._tools.MemTracker`` does: a storage counts from when it is first seen until it is gone, with
the size that it has at each operation. What C++ code never shows to an operation, such as copies that gloo makes, does
not count.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smp_strategy.pipeline.coroutine import ProgramThread

__all__ = ["Baseline", "LiveBytes", "peak_of"]


class Baseline:
    """The tensors that exist by now; those of an experiment come later."""

    def __init__(self) -> None:
        self._before = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors()}

    def since(self) -> Iterator[Tensor]:
        """Those that have come since, and are there."""
        return (tensor for tensor in _tensors() if tensor.untyped_storage()._cdata not in self._before)


def peak_of(run: Callable[[], object], at_rest: Iterator[Tensor]) -> int:
    """Bytes alive at most.

    Args:
        run: what is watched, in this thread and in those of microbatches, which take turns with it.
        at_rest: tensors that exist before, and count.
    """
    watch = LiveBytes(at_rest)
    watch.during(run)
    return watch.peak


@contextmanager
def _in_microbatches(watch: TorchDispatchMode) -> Iterator[None]:
    """Modes are those of a thread."""
    begin = ProgramThread.begin

    def watched(thread: ProgramThread, task: Callable[[], None]) -> None:
        def run() -> None:
            with watch:
                task()

        begin(thread, run)

    ProgramThread.begin = watched
    try:
        yield
    finally:
        ProgramThread.begin = begin


class LiveBytes(TorchDispatchMode):
    """Sees all operations of this thread; ``peak`` is the most that was alive after one of them."""

    def __init__(self, at_rest: Iterator[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}
        for tensor in at_rest:
            self._see(tensor)

    def during(self, run: Callable[[], object]) -> None:
        """Watch ``run``, in this thread and in those of microbatches."""
        with self, _in_microbatches(self):
            run()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the tensors inside
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._see(leaf)
        self.peak = max(self.peak, self.now())
        return result

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            # What autograd keeps outlives its Python object, whose weak references die with it.
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def now(self) -> int:
        """Bytes alive now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()  # of now: memory that was gathered is given back by a change of size
        return total


def _tensors() -> Iterator[Tensor]:
    gc.collect()
    return (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu")
