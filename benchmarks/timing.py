"""How long all ranks take together."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["over_ranks", "seconds_of"]


def seconds_of(step: Callable[[], object]) -> float:
    """From the moment in which all ranks begin until the last one ends."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    return over_ranks(time.perf_counter() - begin, dist.ReduceOp.MAX)


def over_ranks(value: float, how: dist.ReduceOp.RedOpType) -> float:
    """Of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, how)
    return tensor.item()
