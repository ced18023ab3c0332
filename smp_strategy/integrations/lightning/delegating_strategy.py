"""Delegation: the methods of Lightning's ``Strategy`` API that a part of the strategy answers in one call.

Lightning calls methods of one object. The parts behind them are objects of their own:
:class:`~smp_strategy.integrations.lightning.resume.ResumeHooks`,
:class:`~smp_strategy.integrations.lightning.checkpoint_hooks.CheckpointHooks` and the engine with its reports.

[Note: collectives of a strategy] Users and Lightning itself call ``reduce``, ``all_gather``, ``broadcast`` and
``barrier`` as in data-parallel training: "my samples and those of the others". The ranks of one replica have the same
samples, so values are exchanged between replicas only; counting each rank would weigh every sample ``pp x tp`` times.
Decisions (stop? keep this checkpoint?) and waiting concern all ranks of the world. Inside a step all of them concern
the replicas. They call torch's own collectives there, which become operations of the step
(:mod:`smp_strategy.pipeline.dist_calls.user_collectives`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine, ProcessMesh
from smp_strategy.engine.rank_group import RankGroup
from smp_strategy.errors import SMPError
from smp_strategy.integrations.lightning.checkpoint_hooks import CheckpointHooks
from smp_strategy.integrations.lightning.joining import compare_steps
from smp_strategy.integrations.lightning.resume import ResumeHooks
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.reports.explain.explanation import Explanation
from smp_strategy.reports.memory_report import MemoryReport
from smp_strategy.reports.timeline.timeline import Timeline

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # make_strategy() adds the base class of the tree in use

__all__ = ["DelegatingStrategy"]

_REDUCE = "`sync_dist=True` or `strategy.reduce`"


class DelegatingStrategy(Host):
    """A Lightning strategy that owns its parts and passes calls on to them."""

    tree: Tree
    """The Lightning tree that this class was made for."""

    def __init__(self, config: SMPConfig, **arguments: Any) -> None:
        self.config = config
        self._engine: Engine | None = None
        self._resume = ResumeHooks(lambda: self.config, lambda: self.engine, self._trainer_of_module)
        self._checkpoints = CheckpointHooks(self, lambda: self.config, self.tree, lambda: self.engine, self._resume)
        super().__init__(**arguments)

    def _trainer_of_module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # Engine and reports

    @property
    def engine(self) -> Engine:
        """The engine of the module that is being trained; exists from ``setup`` on."""
        if self._engine is None:
            raise SMPError(
                "The pipeline exists once the strategy is set up, after `setup` and `configure_model` of the module, "
                "but is needed before. Move what needs it to a later hook, e.g. `on_fit_start`."
            )
        return self._engine

    @property
    def mesh(self) -> ProcessMesh | None:
        """The process mesh, or ``None`` before ``setup``."""
        return None if self._engine is None else self._engine.mesh

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs just now; the default process group then means the replicas."""
        return self._engine is not None and self._engine.inspection.is_in_step

    def explain(self) -> Explanation:
        """The partition and the reasons for it, from the first step on: ``print`` it, or ``save`` it as a page.

        All ranks know it.
        """
        return self.engine.inspection.explain()

    def timeline(self) -> Timeline:
        """The latest training step of each stage beside its schedule: ``print`` it, or ``save`` it.

        Call it on all ranks of a replica, after a training step: in a callback, say, or after `trainer.fit`. With
        replicas every rank gets to know its own. ``save`` writes on global rank 0 only.

        Raises:
            SMPError: no training step has run after a schedule yet.
        """
        return self.engine.inspection.timeline()

    def memory_report(self) -> MemoryReport:
        """The memory of each rank, counted, beside the prediction: ``print`` it, or ``save`` it.

        Call it on all ranks between steps, in a hook or a callback: after a run the module is whole again.
        """
        return self.engine.inspection.memory_report()

    def save_partition(self, path: str | Path) -> None:
        """Write the partition (the stage of each unit) to a file, on global rank 0; `load_partition` reads it.

        Raises:
            SMPError: it is not decided yet.
        """
        if self.engine.partition is None:
            raise SMPError("The partition is decided in the first step, but is asked for before. Ask after it.")
        if self.global_rank == 0:
            self.engine.partition.save(path)

    # Collectives, see [Note: collectives of a strategy]

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
        return RankGroup(group).reduce(tensor, name, _REDUCE)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, or from ``group``; a single replica gathers nothing, like a single process."""
        group = self._group(group)
        if group is None:
            return tensor
        if not self.is_in_step:
            RankGroup(group).wait("`self.all_gather`")
        return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks of the world."""
        if not dist.is_initialized():
            return decision
        if self.is_in_step:
            vote = torch.tensor(int(decision), device="cpu")
            dist.all_reduce(vote)
            return int(vote) == dist.get_world_size() if all else bool(vote)
        return RankGroup().agree(decision, "a decision of all ranks", all=all)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        if not dist.is_initialized():
            return obj
        if self.is_in_step:
            box = [obj]
            dist.broadcast_object_list(box, src)
            return box[0]
        return RankGroup().tell(obj, src, "`strategy.broadcast`")

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.is_in_step:
            dist.barrier()
        elif dist.is_initialized():
            RankGroup().wait("`strategy.barrier`")

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

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights under their plain names. Collective."""
        return self._checkpoints.lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state: all of it, or with sharded checkpoints this rank's part. Collective."""
        return self._checkpoints.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, or begin to; the Trainer waits for all ranks afterwards. Collective."""
        self._checkpoints.save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of either form, on global rank 0, once the newer one in flight is complete."""
        self._checkpoints.remove_checkpoint(filepath, super().remove_checkpoint)

    def recover_checkpoints(self, trainer: Any) -> None:
        """Put back checkpoints that an interrupted save has moved aside, before anybody looks for the last one."""
        self._checkpoints.recover_checkpoints(trainer)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded when the engine exists, which remembers them for tensors without memory."""
        return self.config.delayed_parameter_initialization

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either form; see :meth:`.checkpoint_hooks.CheckpointHooks.load_checkpoint`."""
        return self._checkpoints.load_checkpoint(checkpoint_path, weights_only, super().load_checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the weights; before the first step that is all of them."""
        self._checkpoints.load_model_state_dict(self._engine, checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizers' state, and the engine's own."""
        self._checkpoints.load_optimizer_state_dict(checkpoint)

    # Resumption

    def on_train_start(self) -> None:
        """Compare how many batches the ranks have, and continue with the data and random numbers of an earlier run."""
        compare_steps(self._trainer_of_module())
        self._resume.on_train_start()

    def on_train_end(self) -> None:
        """Remember the positions of the loaders, which Lightning drops now."""
        self._resume.on_train_end()
