"""What ranks of a shard group do together with flat buffers.

A collective is started, goes on while the caller computes, and is waited for when its result is needed and before its
inputs are changed or freed. All ranks start the same ones in the same order, from one thread. Where the backend does
them in place and on a stream of its own (NCCL), they are its own; for gloo they are made of messages
(:mod:`smp_strategy.distributed.collectives.gloo`), by way of the host where ranks share an accelerator
(:mod:`smp_strategy.distributed.collectives.host_staged`). What ranks tell each other in numbers is always on the host.
"""

from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.collectives.direct import add_up
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.distributed.collectives.host_staged import HostStagedCollectives
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.work import Work, wait_for

__all__ = ["Collectives", "NativeCollectives", "collectives_of"]


class Collectives(Protocol):
    """The collectives of one group. A group has one such object, which counts what is under way.

    Attributes:
        rank, size: of this process in the group, and of the group.
    """

    rank: int
    size: int

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Work[object]] = ()) -> Work[object]:
        """Fill ``full`` with the shards of all ranks, one behind the other.

        Args:
            full: gets the elements in place.
            shard: this rank's; may be its own part of ``full``.
            after: what must be over before the shard is ready. The caller need not wait for it.
        """

    def reduce(self, full: Tensor, into: Tensor, after: Sequence[Work[object]] = (), *, is_first: bool) -> Work[object]:
        """Add up this rank's part of all ranks' ``full``.

        Args:
            full: its parts for the ranks, one behind the other; used up.
            into: gets the sum, when it is waited for; may be of a wider dtype.
            after: what must be over before ``full`` is ready. The caller need not wait for it.
            is_first: whether the sum replaces what is there, and is not added to it.
        """

    def all_reduce(self, tensor: Tensor, after: Sequence[Work[object]] = ()) -> Work[object]:
        """Add up all ranks' ``tensor``, in place; all get the same bits.

        Args:
            tensor: what is added up.
            after: what must be over before the tensor is ready. The caller need not wait for it.
        """

    def close(self) -> None:
        """Let go of what is needed in the background."""


def collectives_of(
    group: dist.ProcessGroup,
    device: torch.device,
    per_node: int | None = None,
    *,
    gathers_in_hops: bool = True,
    most_reduced: int | None = None,
) -> Collectives:
    """The collectives of ``group`` for buffers on ``device``.

    Args:
        group: the ranks, node by node.
        device: where the buffers are.
        per_node: how many ranks of the group are on each node, if it spans several and each byte is to cross the link
            between them once per node. For messages only: other backends know their links.
        gathers_in_hops: whether that goes for gathers, too, and not for reductions alone.
        most_reduced: most elements of a buffer that are reduced at once. For messages only: other backends need no
            memory of that size in between.
    """
    if group._get_backend(device).name() != "gloo":
        return NativeCollectives(group)
    messages = GlooCollectives(group, per_node, gathers_in_hops=gathers_in_hops, most_reduced=most_reduced)
    return messages if is_host(device) else HostStagedCollectives(messages, device)


@final
class NativeCollectives:
    """Those of the backend, in one hop. Reductions add in an order of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Work[object]] = ()) -> Work[object]:
        """See :meth:`Collectives.gather`."""
        # On a stream this only puts it behind, here and below.
        wait_for(after)
        # Bytes, because a backend does not know every dtype.
        work = self._group._allgather_base(full.view(torch.uint8), shard.view(torch.uint8))
        return Work(work.wait)

    def reduce(self, full: Tensor, into: Tensor, after: Sequence[Work[object]] = (), *, is_first: bool) -> Work[object]:
        """See :meth:`Collectives.reduce`."""
        wait_for(after)
        is_in_place = is_first and into.dtype == full.dtype
        total = into if is_in_place else torch.empty_like(into, dtype=full.dtype)
        work = self._group._reduce_scatter_base(total, full, dist.ReduceScatterOptions())

        def finish() -> None:
            work.wait()
            if not is_in_place:
                add_up(into, [total], is_first=is_first)

        return Work(finish)

    def all_reduce(self, tensor: Tensor, after: Sequence[Work[object]] = ()) -> Work[object]:
        """See :meth:`Collectives.all_reduce`."""
        wait_for(after)
        return Work(self._group.allreduce([tensor]).wait)

    def close(self) -> None:
        """See :meth:`Collectives.close`."""
