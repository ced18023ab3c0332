"""What ``reduce``, ``all_gather`` and their like mean under a pipeline.

Users and Lightning itself call them as in data-parallel training: "my samples and those of the others". The ranks of
one replica have the same samples, so values are exchanged between replicas only; counting each rank would weigh every
sample ``pp x tp`` times. Decisions (stop? keep this checkpoint?) and waiting concern all ranks of the world, but in a
step the replicas, as all collectives there do (:mod:`smp_strategy.pipeline.collectives`).
"""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from smp_strategy.lightning.factory import Tree
from smp_strategy.mesh import ProcessMesh
from smp_strategy.waiting import collectives

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

    @property
    def mesh(self) -> ProcessMesh | None:
        """Where the ranks stand, or ``None`` before ``setup``."""
        raise NotImplementedError

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs just now, where the default process group means the replicas."""
        raise NotImplementedError

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, or over ``group``; before ``setup`` over all ranks."""
        group = self._group(group)
        if group is None or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).lower().rpartition(".")[2]
        op = getattr(dist.ReduceOp, "SUM" if name in ("mean", "avg", "none") else name.upper())
        collectives.barrier(_REDUCE, group)
        collectives.all_reduce(tensor, op, group=group, doing=_REDUCE).wait()
        return tensor.copy_(tensor / dist.get_world_size(group)) if name in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, or from ``group``; with one replica nothing is gathered, as in one process."""
        group = self._group(group)
        if group is None:
            return tensor
        collectives.barrier("`self.all_gather`", group)
        return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks of the world."""
        if not dist.is_initialized():
            return decision
        votes = collectives.gather_numbers(int(decision), "a decision of all ranks")
        return min(votes) == 1 if all else max(votes) == 1

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        if not dist.is_initialized():
            return obj
        return collectives.tell(obj, src, "`strategy.broadcast`")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
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
