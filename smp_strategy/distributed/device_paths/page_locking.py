"""Page-locking of memory that was allocated otherwise (``cudaHostRegister``).

PyTorch's own page-locked memory belongs to one process. Memory that several processes map is locked by each of them;
then each can copy between it and its device while it computes.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
"""

from typing import Any, Final

import torch
from torch import Tensor

from smp_strategy.distributed.device import current_stream, entered

__all__ = ["page_lock", "page_unlock"]

_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: locked for all devices of the process."""


def page_lock(memory: Tensor, device: torch.device) -> None:
    """Page-lock ``memory`` of the host, which is contiguous.

    Args:
        memory: memory of the host.
        device: device of this rank. Another one would be initialised if it were the thread's current one.

    Raises:
        RuntimeError: the system or the driver refuses.
    """
    runtime: Any = torch.cuda.cudart()
    with entered(current_stream(device)):
        _check(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE), "locking")


def page_unlock(memory: Tensor, device: torch.device) -> None:
    """Undo :func:`page_lock`, once no copy uses ``memory`` any more."""
    runtime: Any = torch.cuda.cudart()
    with entered(current_stream(device)):
        _check(runtime.cudaHostUnregister(memory.data_ptr()), "unlocking")


def _check(status: Any, doing: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{doing} shared memory in RAM failed: {status}")
