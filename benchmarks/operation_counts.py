"""Work that a device is given, counted: operations of aten, and the bytes that they read and write.

A dispatch mode sees every operation of a thread below autograd and above the kernels. Figures are exact.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Counts"]

# Not views by their schema, but without work for a device.
_NO_WORK = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view", "_lazy_clone"}
)
# Write what they do not read.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"})
# Files of the package that call an operation for what ranks exchange.
_MESSAGES = ("smp_strategy/distributed/", "smp_strategy/pipeline/transport/")
_PACKING = ("smp_strategy/data_parallel/flat_", "smp_strategy/data_parallel/bucketed_all_reduce")


@dataclass
class Counts(TorchDispatchMode):
    """Operations of all threads, while it counts."""

    operations: int = 0
    """That compute or copy."""
    bytes_moved: int = 0
    of_messages: int = 0
    """Bytes of sums and copies that a backend makes for peers."""
    of_packing: int = 0
    """Bytes of copies into flat buffers and out of them."""
    views: int = 0
    """Views and allocations."""
    by_name: dict[str, int] = field(default_factory=dict)
    is_on: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local tensor come by
        result = func(*args, **(kwargs or {}))
        if self.is_on and func.namespace == "aten":
            name = str(func.overloadpacket).removeprefix("aten.")
            if func.is_view or name in _NO_WORK:
                self.views += 1
            else:
                self.operations += 1
                self.by_name[name] = self.by_name.get(name, 0) + 1
                moved = _bytes_moved(func, name, args, kwargs or {}, result)
                self.bytes_moved += moved
                caller = _caller()
                self.of_messages += moved if any(place in caller for place in _MESSAGES) else 0
                self.of_packing += moved if any(place in caller for place in _PACKING) else 0
        return result

    @contextlib.contextmanager
    def in_all_threads(self) -> Iterator[None]:
        """Context whose threads have this mode from their start on."""
        run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with self:
                run(thread)

        threading.Thread.run = watched
        try:
            with self:
                yield
        finally:
            threading.Thread.run = run

    def of(self, step: Callable[[], object]) -> "Counts":
        """Count ``step``."""
        self.is_on = True
        step()
        self.is_on = False
        return self

    @property
    def figures(self) -> tuple[Any, ...]:
        """Counts in the order of the fields, for another process."""
        return astuple(self)


def _bytes_moved(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that an operation reads and writes."""
    moved = 0
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not is_written or not (argument.is_out or name in _OVERWRITES)
        moved += (is_written + is_read) * _nbytes(value)
    returned = zip(func._schema.returns, result if len(func._schema.returns) > 1 else [result], strict=False)
    return moved + sum(_nbytes(value) for declared, value in returned if declared.alias_info is None)


def _nbytes(value: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def _caller() -> str:
    """File that has called an operation; not one of PyTorch, nor this one."""
    frame = sys._getframe(2)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename
