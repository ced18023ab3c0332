"""How many bytes does a rank send in collectives?

What counts is what the best algorithms send for them (a ring, say): of each tensor, every rank gets the parts that the
others have, once for each gather and each reduction; a sum of which all have the result is both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["wire_bytes"]


def wire_bytes(run: Callable[[], object]) -> float:
    """Of this rank, in collectives over all ranks that ``run`` starts in its threads of Python."""
    watch = _Watch()
    with watch:
        run()
    return watch.total


# Operation: which argument is the tensor, and how many times its bytes are sent, for a number of ranks.
_SENT: Mapping[str, tuple[int, Callable[[int], float]]] = {
    "c10d.allreduce_": (0, lambda ranks: 2 * (ranks - 1) / ranks),
    "c10d._allgather_base_": (1, lambda ranks: ranks - 1),
    "c10d._reduce_scatter_base_": (1, lambda ranks: (ranks - 1) / ranks),
    "_c10d_functional.all_reduce": (0, lambda ranks: 2 * (ranks - 1) / ranks),
    "_c10d_functional.all_gather_into_tensor": (0, lambda ranks: ranks - 1),
    "_c10d_functional.reduce_scatter_tensor": (0, lambda ranks: (ranks - 1) / ranks),
}
_FREE = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


class _Watch(TorchDispatchMode):
    """Sees all operations of this thread, and of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the tensors inside
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(str(func.overloadpacket), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        name = name.replace("_autograd.", ".")
        if name in _SENT:
            position, times = _SENT[name]
            tensors = [args[position]] if isinstance(args[position], Tensor) else args[position]
            self.total += times(dist.get_world_size()) * sum(tensor.nbytes for tensor in tensors)
        elif not name.endswith(_FREE):
            raise AssertionError(f"{name} is not counted.")
