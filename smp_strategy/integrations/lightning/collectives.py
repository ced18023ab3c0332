"""Collectives of the strategy: ``reduce``, ``all_gather``, ``broadcast`` and ``barrier`` under a pipeline.

Users and Lightning itself call them as in data-parallel training: "my samples and those of the others". The ranks of
one replica have the same samples, so values are exchanged between replicas only; counting each rank would weigh every
sample ``pp x tp`` times. Decisions (stop? keep this checkpoint?) and waiting concern all ranks of the world.

Inside a step all of them concern the replicas. They call torch's own collectives there, which become operations of the
step (:mod:`smp_strategy.pipeline.dist_calls.user_collectives`).
"""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.engine import Engine
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["CommunicationHooks"]

_REDUCE = "`sync_dist=True` or `strategy.reduce`"


@final
class CommunicationHooks:
    """The collectives of one strategy.

    Args:
        tree: the Lightning tree in use.
        engine: returns the engine of the run, ``None`` before ``setup``.
    """

    def __init__(self, tree: Tree, engine: Callable[[], Engine | None]) -> None:
        self._tree = tree
        self._engine = engine

    @property
    def mesh(self) -> ProcessMesh | None:
        """The process mesh, or ``None`` before ``setup``."""
        engine = self._engine()
        return None if engine is None else engine.mesh

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs just now; the default process group then means the replicas."""
        engine = self._engine()
        return engine is not None and engine.inspection.is_in_step

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, or over ``group``; before ``setup`` over all ranks."""
        group = self._group(group)
        if group is None or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).lower().rpartition(".")[2]
        if self.is_in_step:
            sync = self._tree.fabric("utilities.distributed")._sync_ddp_if_available
            total = sync(tensor, group, reduce_op="sum" if name in ("mean", "avg") else reduce_op)
            return total.copy_(total / dist.get_world_size(group)) if name in ("mean", "avg") else total
        op = getattr(dist.ReduceOp, "SUM" if name in ("mean", "avg", "none") else name.upper())
        collectives.barrier(_REDUCE, group)
        collectives.all_reduce(tensor, op, group=group, doing=_REDUCE).wait()
        return tensor.copy_(tensor / dist.get_world_size(group)) if name in ("mean", "avg") else tensor

    def all_gather(
        self, plain: Callable[..., Tensor], tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather from the replicas, or from ``group``; a single replica gathers nothing, like a single process.

        Args:
            plain: Lightning's own ``all_gather``.
            tensor: this rank's value.
            group: a process group, or ``None`` for the replicas.
            sync_grads: whether the result is differentiable.
        """
        group = self._group(group)
        if group is None:
            return tensor
        if not self.is_in_step:
            collectives.barrier("`self.all_gather`", group)
        return plain(tensor, group, sync_grads)

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
        """The process group for values, or ``None`` for nobody. (LightningModule passes WORLD for "default".)"""
        if not dist.is_initialized():
            return None
        if group is not None and group is not dist.group.WORLD:
            return group
        if self.mesh is None:
            return dist.group.WORLD
        if self.mesh.dp == 1:
            return None
        # torch's backward of a gather takes ranks of the default group, which means the replicas inside a step.
        return dist.group.WORLD if self.is_in_step else self.mesh.dp_group
