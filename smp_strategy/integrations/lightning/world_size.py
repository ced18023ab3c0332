"""World size and global rank: Lightning's code counts ranks, user code counts data-parallel replicas.

User code divides a batch by ``trainer.world_size``, scales a learning rate by it, or divides samples with it. It means
the number of processes that read different samples, and all ranks of a replica read the same ones. Lightning's own code
asks whether there are other processes to wait for.

User code also divides samples by ``global_rank`` (``DistributedSampler(data, world_size, global_rank)``), so in hooks
that make data it is the index of the replica. Elsewhere user code names files by it, or restricts work to a single
process; there, and for Lightning always, it is the rank.

The answer therefore depends on the caller, which is found on the stack.
"""

import sys
from types import FrameType

import torch.distributed as dist
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.degrees import choose_shape
from smp_strategy.errors import ConfigError

__all__ = ["asked_by_lightning", "asked_to_make_data", "find_replica"]

_INTERNAL = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "smp_strategy"})
_PASSING_ON = {
    f"{tree}.{module}": names
    for tree in ("lightning.pytorch", "pytorch_lightning")
    for module, names in (("trainer.trainer", ("world_size", "global_rank")), ("core.module", ("global_rank",)))
}
_CALLING_HOOKS = frozenset({"lightning.pytorch.trainer.call", "pytorch_lightning.trainer.call"})
_HOOK_CALLERS = frozenset({"_call_lightning_module_hook", "_call_lightning_datamodule_hook"})
_LOADERS = frozenset(f"{loop}_dataloader" for loop in ("train", "val", "test", "predict"))
_MAKING_DATA = _LOADERS | {"setup"}


def asked_by_lightning() -> bool:
    """Whether Lightning or this package reads the property. Call it in the body of the property."""
    return _is_internal(_asking(sys._getframe(2)))


def asked_to_make_data() -> bool:
    """Whether user code reads the property in a hook that makes data. Call it in the body of the property.

    These hooks are the loaders' and ``setup``, of modules and datamodules. User code may call a loader's hook, too.
    """
    asking = _asking(sys._getframe(2))
    if _is_internal(asking):
        return False
    frame: FrameType | None = asking
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") in _CALLING_HOOKS:
            # The innermost hook that Lightning calls decides; a function `setup` of a script around it does not.
            return name in _HOOK_CALLERS and frame.f_locals.get("hook_name") in _MAKING_DATA
        if name in _LOADERS and not _is_internal(frame):
            return True
        frame = frame.f_back
    return False


def _asking(frame: FrameType) -> FrameType:
    """The frame of the caller, beyond properties of Trainer and module that delegate."""
    while frame.f_code.co_name in _PASSING_ON.get(str(frame.f_globals.get("__name__")), ()) and frame.f_back:
        frame = frame.f_back
    return frame


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL


def find_replica(config: SMPConfig, module: nn.Module | None, num_ranks: int, rank: int) -> tuple[int, int]:
    """The number of data-parallel readers and the index of this one, before the mesh exists.

    The module is as far as it is built; without a pipeline degree the number of stages depends on it.
    """
    if module is None or not dist.is_initialized():
        return num_ranks, rank
    try:
        shape = choose_shape(config, module, lambda text: None)
    except ConfigError:  # raised again when the mesh is made
        return num_ranks, rank
    return shape.reader_of(rank, is_joint=config.prescaled_batch)
