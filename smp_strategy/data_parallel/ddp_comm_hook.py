"""Communication hook of PyTorch's DistributedDataParallel: its buckets are summed hierarchically between nodes.

For training loops that stay with DistributedDataParallel, over gloo::

    model = DistributedDataParallel(model)
    model.register_comm_hook(HierarchicalAllReduceState(), hierarchical_allreduce_hook)

DistributedDataParallel fills a bucket in the order of backward and passes it to the hook. The hook cuts it into fusion
buffers of one size, and all-reduces each of them as
:mod:`smp_strategy.distributed.collectives.gloo` describes, while backward goes on. A thread waits
for the sums and completes the future that DistributedDataParallel waits for at the end of backward.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from smp_strategy.distributed.background_wait import Relay
from smp_strategy.distributed.collectives.fusion_buffers import FUSION_BYTES
from smp_strategy.distributed.collectives.interface import Collectives, collectives_of, is_gloo
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.failure import raise_lost
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.distributed.process_groups import new_group
from smp_strategy.distributed.topology import find_ranks_per_node
from smp_strategy.errors import ConfigError

__all__ = ["HierarchicalAllReduceState", "hierarchical_allreduce_hook"]


@final
class HierarchicalAllReduceState:
    """State of :func:`hierarchical_allreduce_hook`: the ranks, and the nodes that they are on.

    Construction is collective over the ranks of ``group``.

    Args:
        group: ``process_group`` of the DistributedDataParallel module; ``None``: all ranks.
        ranks_per_node: Number of its ranks on each node, which are numbered node by node; ``None``: as the launcher
            (``LOCAL_WORLD_SIZE``) or the names of the hosts say.
        buffer_bytes: Size of a fusion buffer.

    Attributes:
        ranks_per_node: Number of ranks on each node; ``None``: there is no hierarchy, because the group is on one node,
            or nodes have one rank each or different numbers of them. Then the backend all-reduces.

    Raises:
        ConfigError: ``ranks_per_node`` does not divide the number of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        buffer_bytes: int = FUSION_BYTES,
    ) -> None:
        # A group of its own, because messages of the user may have the tags of ours.
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self.group = new_group(ranks, among_members=group is not None)
        self.size = self.group.size()
        self.buffer_bytes = buffer_bytes
        if ranks_per_node is None:
            ranks_per_node = find_ranks_per_node(self.group)
        elif ranks_per_node < 1 or self.size % ranks_per_node:
            raise ConfigError(
                f"`ranks_per_node` must divide the number of ranks ({self.size}), but is {ranks_per_node}."
            )
        is_hierarchy = ranks_per_node is not None and 1 < ranks_per_node < self.size
        self.ranks_per_node = ranks_per_node if is_hierarchy else None
        self._collectives: Collectives | None = None
        self._waiting = Relay()

    def collectives(self, device: torch.device) -> Collectives | None:
        """Hierarchical collectives for gradients on ``device``; ``None``: the backend all-reduces."""
        if self.ranks_per_node is None or not is_gloo(self.group, device):
            return None
        if self._collectives is None:
            self._collectives = collectives_of(self.group, device, self.ranks_per_node)
        return self._collectives

    def future_of(self, tensor: Tensor, works: list[Handle[object]]) -> Future[Tensor]:
        """Future of ``tensor``, which is complete when all ``works`` are over."""
        begun: Future[None] = Future(devices=None if is_host(tensor.device) else [tensor.device])
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != dist.get_rank()]

        def finish(_: object) -> Tensor:
            try:
                wait_for(works)
            except RuntimeError as error:
                raise_lost(error, others, "averaging gradients together with")
            return tensor

        # In the thread. DistributedDataParallel can read the error of a callback, but not a future's `set_exception`.
        finished: Future[Tensor] = begun.then(finish)
        self._waiting.submit(lambda: begun.set_result(None))
        return finished

    def close(self) -> None:
        """End the background threads; the hook cannot be used afterwards."""
        self._waiting.close()
        if self._collectives is not None:
            self._collectives.close()


def hierarchical_allreduce_hook(state: HierarchicalAllReduceState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over the ranks, in two hops if they span nodes.

    Give it to ``DistributedDataParallel.register_comm_hook``, on all ranks. The averages are those of
    DistributedDataParallel up to the order of additions: sums of nodes are added in the order of the nodes. All ranks
    get the same bits.

    Args:
        state: Ranks and nodes.
        bucket: Gradients of some parameters, as DistributedDataParallel passes them.

    Returns:
        Future of the averages. A rank that has failed makes it raise.
    """
    gradients = bucket.buffer()
    collectives = state.collectives(gradients.device)
    if collectives is None:
        return allreduce_hook(state.group, bucket)
    gradients.div_(state.size)
    size = max(state.buffer_bytes // gradients.element_size(), state.size)
    # Equal parts for all ranks.
    buffers = gradients.split(size - size % state.size)
    return state.future_of(gradients, [collectives.all_reduce(buffer) for buffer in buffers])
