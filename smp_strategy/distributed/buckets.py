"""Buckets: many small tensors travel as a few large messages.

A message per tensor would pay the start-up cost of a collective each time; one message for all would take their memory
once more.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

__all__ = ["BUCKET_BYTES", "buckets"]

# Large enough that the start-up cost of a collective vanishes, small enough to bound the extra memory.
BUCKET_BYTES = 25 * 2**20


class SizedTensor(Protocol):
    """A tensor, or its metadata."""

    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


def buckets(tensors: Iterable[SizedTensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Indices of consecutive ``tensors`` of one dtype, in runs of at most ``most_bytes`` or a single tensor."""
    bucket: list[int] = []
    size = 0
    dtype: torch.dtype | None = None
    for number, tensor in enumerate(tensors):
        if bucket and (size + tensor.nbytes > most_bytes or tensor.dtype != dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(number)
        size += tensor.nbytes
        dtype = tensor.dtype
    if bucket:
        yield bucket
