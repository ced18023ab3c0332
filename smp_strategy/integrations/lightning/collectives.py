"""What ``reduce``, ``all_gather`` and ``world_size`` mean under a pipeline.

Users and Lightning itself call them as in data-parallel training: "my samples and those of the others". The ranks of
one replica have the same samples, so values are exchanged between replicas only; counting each rank would weigh every
sample ``pp x tp`` times. Decisions (stop? keep this checkpoint?) and waiting concern all ranks of the world.

In a step all of them concern the replicas. They call torch's own collectives there, which become operations of the step
(:mod:`smp_strategy.pipeline.user_collectives`).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.integrations.lightning.data import DataRngSync
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.integrations.lightning.world_size import asked_by_lightning, asked_to_make_data, find_replica

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # make_strategy() adds the base class of the tree in use

__all__ = ["CommunicationHooks"]

_REDUCE = "`sync_dist=True` or `strategy.reduce`"


class CommunicationHooks(Host):
    """The strategy's hooks that exchange values. See the module's docstring."""

    tree: Tree
    """The Lightning tree that this class was made for."""
    config: SMPConfig
    num_nodes: int
    _data_stream: DataRngSync | None = None

    @property
    def mesh(self) -> ProcessMesh | None:
        """Where the ranks stand, or ``None`` before ``setup``."""
        raise NotImplementedError

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs just now, where the default process group means the replicas."""
        raise NotImplementedError

    @property
    def num_processes(self) -> int:
        """Ranks on this machine; to user code, replicas. See :mod:`smp_strategy.integrations.lightning.world_size`."""
        num_ranks = len(self.parallel_devices) if self.parallel_devices is not None else 0
        if asked_by_lightning() or not num_ranks:
            return num_ranks
        return max(1, self._replica(num_ranks * self.num_nodes)[0] // self.num_nodes)

    @property
    def world_size(self) -> int:
        """Ranks on all machines; to user code, replicas."""
        num_ranks: int = super().world_size
        return num_ranks if asked_by_lightning() else self._replica(num_ranks)[0]

    @property
    def global_rank(self) -> int:
        """This rank among all; to user code that makes data, this replica among all."""
        rank: int = super().global_rank
        return self._replica(int(super().world_size), rank)[1] if asked_to_make_data() else rank

    def _replica(self, num_ranks: int, rank: int = 0) -> tuple[int, int]:
        """How many replicas there are, and which of them ``rank`` belongs to."""
        if self._data_stream is not None:
            kwargs = self.distributed_sampler_kwargs
            return int(kwargs["num_replicas"]), int(kwargs["rank"])
        return find_replica(self.config, self.lightning_module, num_ranks, rank)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, or over ``group``; before ``setup`` over all ranks."""
        group = self._group(group)
        if group is None or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).lower().rpartition(".")[2]
        if self.is_in_step:
            sync = self.tree.fabric("utilities.distributed")._sync_ddp_if_available
            total = sync(tensor, group, reduce_op="sum" if name in ("mean", "avg") else reduce_op)
            return total.copy_(total / dist.get_world_size(group)) if name in ("mean", "avg") else total
        op = getattr(dist.ReduceOp, "SUM" if name in ("mean", "avg", "none") else name.upper())
        collectives.barrier(_REDUCE, group)
        collectives.all_reduce(tensor, op, group=group, doing=_REDUCE).wait()
        return tensor.copy_(tensor / dist.get_world_size(group)) if name in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, or from ``group``; with one replica nothing is gathered, as in one process."""
        group = self._group(group)
        if group is None:
            return tensor
        if not self.is_in_step:
            collectives.barrier("`self.all_gather`", group)
        return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks of the world."""
        if not dist.is_initialized():
            return decision
        if self.is_in_step:
            vote = torch.tensor(int(decision), device="cpu")
            dist.all_reduce(vote)
            return int(vote) == dist.get_world_size() if all else bool(vote)
        votes = collectives.gather_numbers(int(decision), "a decision of all ranks")
        return min(votes) == 1 if all else max(votes) == 1

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        if not dist.is_initialized():
            return obj
        if self.is_in_step:
            box = [obj]
            dist.broadcast_object_list(box, src)
            return box[0]
        return collectives.tell(obj, src, "`strategy.broadcast`")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.is_in_step:
            dist.barrier()
        elif dist.is_initialized():
            collectives.barrier("`strategy.barrier`")

    def _group(self, group: Any) -> Any:
        """The process group to communicate in, or ``None`` for nobody. (LightningModule says WORLD for "default".)"""
        if not dist.is_initialized():
            return None
        if group is not None and group is not dist.group.WORLD:
            return group
        if self.mesh is None:
            return dist.group.WORLD
        if self.mesh.dp == 1:
            return None
        # torch's gradient of a gather takes ranks of the default group.
        return dist.group.WORLD if self.is_in_step else self.mesh.dp_group
