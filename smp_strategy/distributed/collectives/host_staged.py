"""Host-staged collectives of accelerator buffers: for ranks that share an accelerator, which NCCL refuses.

A buffer is copied into page-locked memory, on a stream of its own, and the result of the host's collective is copied
back. The collective begins when the copy is done, for which its background thread waits, not the caller. Sums are
computed on the host, in the same order as for ranks without accelerators, so the bits are the same.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.distributed.host_copies import HostCopies

__all__ = ["HostStagedCollectives"]


@final
class HostStagedCollectives:
    """:class:`~smp_strategy.distributed.collectives.interface.Collectives` by way of the host."""

    def __init__(self, messages: GlooCollectives, device: torch.device) -> None:
        self.rank, self.size = messages.rank, messages.size
        self._messages = messages
        self._copies = HostCopies(device)

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.gather`."""
        if is_host(full.device):
            return self._messages.gather(full, shard, after)
        # By the caller: such work ends with a copy to the device, which belongs on the caller's stream. Here and below.
        wait_for(after)
        mine, of_all = self._copies.out(shard), self._copies.memory(full.nbytes).view(full.dtype)
        gathered = self._messages.gather(of_all, mine.memory, [Handle(mine.wait)])
        return gathered.then(lambda _: full.copy_(of_all, non_blocking=True))

    def reduce(
        self, full: Tensor, into: Tensor, after: Sequence[Handle[object]] = (), *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """See :meth:`Collectives.reduce`."""
        if is_host(full.device):
            return self._messages.reduce(full, into, after, is_first=is_first, factor=factor)
        wait_for(after)
        # With the previous value, which is the first summand.
        summands, total = self._copies.out(full), self._copies.out(into)
        copied = [Handle(summands.wait), Handle(total.wait)]
        reduced = self._messages.reduce(summands.memory, total.memory, copied, is_first=is_first, factor=factor)
        return reduced.then(lambda _: into.copy_(total.memory, non_blocking=True))

    def all_reduce(self, tensor: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.all_reduce`."""
        if is_host(tensor.device):
            return self._messages.all_reduce(tensor, after)
        wait_for(after)
        summand = self._copies.out(tensor)
        added_up = self._messages.all_reduce(summand.memory, [Handle(summand.wait)])
        return added_up.then(lambda _: tensor.copy_(summand.memory, non_blocking=True))

    def close(self) -> None:
        """See :meth:`Collectives.close`."""
        self._messages.close()
