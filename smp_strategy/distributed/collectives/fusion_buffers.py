"""Fusion buffers: tensors of any size travel as all-reduces of one fixed size.

Gradients become ready one after the other, some of them tiny and some larger than a message should be. They are copied
behind each other into a buffer of fixed size, across its end into the next one if necessary. A full buffer is
all-reduced while the next one fills. So every all-reduce has the same size, except the last one, and every rank sends
the same bytes at any time, whatever the sizes of the tensors.
"""

from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import Handle

__all__ = ["FUSION_BYTES", "FusionBuffers"]

FUSION_BYTES: Final = 4 * 2**20
"""Size of a buffer. Larger buffers need fewer messages; smaller ones begin earlier and leave less for the end."""


@final
class FusionBuffers:
    """:class:`~smp_strategy.distributed.collectives.interface.JoinedSums` in buffers of one size."""

    def __init__(self, collectives: Collectives, most_bytes: int = FUSION_BYTES) -> None:
        self._collectives = collectives
        self._most_bytes = most_bytes
        self._buffer: _Buffer | None = None

    def add(self, tensors: Sequence[Tensor], *, dtype: torch.dtype) -> Handle[Tensor]:
        """See :meth:`JoinedSums.add`."""
        runs: dict[_Buffer, slice] = {}
        for tensor in tensors:
            rest = tensor.reshape(-1)
            while rest.numel():
                buffer = self._buffer_for(dtype, rest.device)
                start = runs[buffer].start if buffer in runs else buffer.filled
                rest = buffer.fill(rest)
                runs[buffer] = slice(start, buffer.filled)
                if buffer.filled == len(buffer.memory):
                    self.flush()
        return Handle(lambda: _joined([buffer.sums(run) for buffer, run in runs.items()], dtype))

    def flush(self) -> None:
        """See :meth:`JoinedSums.flush`: sends what has been added since the last full buffer."""
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            buffer.reduced = self._collectives.all_reduce(buffer.memory[: buffer.filled])

    def _buffer_for(self, dtype: torch.dtype, device: torch.device) -> "_Buffer":
        if self._buffer is not None and (self._buffer.memory.dtype, self._buffer.memory.device) != (dtype, device):
            self.flush()
        if self._buffer is None:
            size = max(self._most_bytes // dtype.itemsize, self._collectives.size)
            # Equal parts for all ranks.
            size -= size % self._collectives.size
            self._buffer = _Buffer(torch.empty(size, dtype=dtype, device=device))
        return self._buffer


@final
class _Buffer:
    """A buffer that is being filled, or all-reduced."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.filled = 0
        self.reduced: Handle[object] | None = None

    def fill(self, tensor: Tensor) -> Tensor:
        """Copy as much as there is room for; returns the rest."""
        count = min(len(tensor), len(self.memory) - self.filled)
        self.memory[self.filled : self.filled + count].copy_(tensor[:count])
        self.filled += count
        return tensor[count:]

    def sums(self, run: slice) -> Tensor:
        """Wait for the sums of a run of elements."""
        assert self.reduced is not None, "buffers are flushed before anyone waits"
        self.reduced.wait()
        return self.memory[run]


def _joined(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=dtype)
