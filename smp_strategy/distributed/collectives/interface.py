"""Collectives of flat buffers: the interface, the choice of an implementation, and the native one (NCCL).

A collective is started, runs while the caller computes, and is waited for when its result is needed and before its
inputs are changed or freed. All ranks start the same ones in the same order, from one thread. If the backend does them
in place and on a stream of its own (NCCL), they are the backend's; for gloo they are made of messages
(:mod:`smp_strategy.distributed.collectives.gloo`), by way of the host if ranks share an accelerator
(:mod:`smp_strategy.distributed.collectives.host_staged`). Numbers that ranks exchange are always on the host.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.collectives.direct import add_up
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.distributed.collectives.host_staged import HostStagedCollectives
from smp_strategy.distributed.collectives.shared_memory_hop import SharedMemoryHop
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.distributed.shared_arena import open_arenas

__all__ = ["Collectives", "JoinedSums", "LoneCollectives", "NativeCollectives", "collectives_of", "is_gloo"]


class Collectives(Protocol):
    """Collectives of a group. A group has a single such object, which numbers its messages.

    Attributes:
        rank: Rank of this process in the group.
        size: Size of the group.
    """

    rank: int
    size: int

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """All-gather: fill ``full`` with the shards of all ranks, in their order.

        Args:
            full: Buffer to fill.
            shard: Shard of this rank; may be its own part of ``full``.
            after: Work that makes the shard ready. The caller need not wait for it.
        """

    def reduce(
        self, full: Tensor, into: Tensor, after: Sequence[Handle[object]] = (), *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """Reduce-scatter: sum this rank's part of all ranks' ``full``.

        Args:
            full: Parts for the ranks, in their order; overwritten.
            into: Gets the sum, when the work is waited for; may be of a wider dtype.
            after: Work that makes ``full`` ready. The caller need not wait for it.
            is_first: Whether the sum replaces the content of ``into`` instead of being added to it.
            factor: Factor of the ranks' values, by which they are multiplied where they are added.
        """

    def all_reduce(self, tensor: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """All-reduce: sum the ranks' ``tensor``, in place; all get the same bits.

        Args:
            tensor: Summand of this rank.
            after: Work that makes the tensor ready. The caller need not wait for it.
        """

    def close(self) -> None:
        """End the background thread."""


class JoinedSums(Protocol):
    """Sums over a group of tensors that are joined into larger ones, in the order in which they are added."""

    def add(self, tensors: Sequence[Tensor], *, dtype: torch.dtype) -> Handle[Tensor]:
        """Add ``tensors`` behind those before, on all ranks tensors of the same sizes in the same order.

        Args:
            tensors: Summands of this rank, each on the same device; they may change afterwards.
            dtype: Dtype in which they are summed.

        Returns:
            Handle of the ranks' sums, one after the other in one dimension, with the same bits on all ranks. They must
            not be written to. Wait for them only after :meth:`flush`.
        """

    def flush(self) -> None:
        """Begin all sums of what has been added, on all ranks at the same places."""


def collectives_of(
    group: dist.ProcessGroup,
    device: torch.device,
    per_node: int | None = None,
    *,
    gathers_in_hops: bool = True,
    most_reduced: int | None = None,
    on_one_node: bool = False,
) -> Collectives:
    """Collectives of ``group`` for buffers on ``device``. Collective over it if ``on_one_node``.

    Args:
        group: Ranks, node by node.
        device: Device of the buffers.
        per_node: Number of ranks of the group on each node, if it spans several and each byte is to cross the link
            between them once per node. For gloo only: other backends know their links.
        gathers_in_hops: Whether that applies to gathers as well, not to reductions alone.
        most_reduced: Most elements of a buffer that are reduced at once. For gloo only: other backends need no memory
            of that size.
        on_one_node: Whether the ranks are on one machine, so that they share memory if the system lets them.
    """
    if not is_gloo(group, device):
        return NativeCollectives(group)
    shared = _shared_memory(group) if on_one_node and is_host(device) else None
    messages = GlooCollectives(
        group, per_node, gathers_in_hops=gathers_in_hops, most_reduced=most_reduced, shared=shared
    )
    return messages if is_host(device) else HostStagedCollectives(messages, device)


def _shared_memory(group: dist.ProcessGroup) -> SharedMemoryHop | None:
    own, theirs, failures = open_arenas(group)
    return None if own is None or failures else SharedMemoryHop(group, own, theirs)


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` sends buffers on ``device`` by gloo, so that their collectives are made of messages."""
    return group._get_backend(device).name() == "gloo"


@final
class NativeCollectives:
    """Collectives of the backend, in one hop. Reductions add in the backend's order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.gather`."""
        # Work on a stream only orders the streams here, and does not block the host. Also below.
        wait_for(after)
        # Bytes, because a backend does not know every dtype.
        work = self._group._allgather_base(full.view(torch.uint8), shard.view(torch.uint8))
        return Handle(work.wait)

    def reduce(
        self, full: Tensor, into: Tensor, after: Sequence[Handle[object]] = (), *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """See :meth:`Collectives.reduce`."""
        wait_for(after)
        is_in_place = is_first and into.dtype == full.dtype
        total = into if is_in_place else torch.empty_like(into, dtype=full.dtype)
        work = self._group._reduce_scatter_base(total, full, dist.ReduceScatterOptions())

        def finish() -> None:
            work.wait()
            if not is_in_place:
                add_up(into, [total], is_first=is_first, factor=factor)
            elif factor != 1:
                into.mul_(factor)

        return Handle(finish)

    def all_reduce(self, tensor: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.all_reduce`."""
        wait_for(after)
        return Handle(self._group.allreduce([tensor]).wait)

    def close(self) -> None:
        """See :meth:`Collectives.close`."""


@final
class LoneCollectives:
    """Collectives of a single rank: nothing is sent."""

    rank, size = 0, 1

    def gather(self, full: Tensor, shard: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.gather`."""
        wait_for(after)
        return Handle(partial(full.copy_, shard))

    def reduce(
        self, full: Tensor, into: Tensor, after: Sequence[Handle[object]] = (), *, is_first: bool, factor: float = 1
    ) -> Handle[object]:
        """See :meth:`Collectives.reduce`."""
        wait_for(after)
        return Handle(partial(add_up, into, [full], is_first=is_first, factor=factor))

    def all_reduce(self, tensor: Tensor, after: Sequence[Handle[object]] = ()) -> Handle[object]:
        """See :meth:`Collectives.all_reduce`."""
        return Handle(partial(wait_for, after))

    def close(self) -> None:
        """See :meth:`Collectives.close`."""
