"""What `trainer.world_size` and `strategy.num_processes` count: ranks to Lightning, replicas to everybody else.

User code divides a batch by them, multiplies a learning rate by them, or deals out samples with them, and means: by how
many readers of other samples. All ranks that run one replica read the same samples, so they count as one. Lightning's
own code asks them whether there are other processes at all, whom it has to wait for or to tell something.

`global_rank` goes with them where samples are dealt out (``DistributedSampler(data, world_size, global_rank)``): in the
hooks that make data it is the number of the replica to user code. Elsewhere user code names files by it, or lets one
process alone do something, so there it is the rank, and to Lightning always.

So the answer depends on who asks and from where, which the stack tells.
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
    """Whether the code that asks for the property that calls this is Lightning's, or ours."""
    return _is_internal(_asking(sys._getframe(2)))


def asked_to_make_data() -> bool:
    """Whether the code that asks for the property that calls this is a user's, in a hook that makes data.

    Those are the loaders' and ``setup``, of modules and datamodules. A loader's hook may be called by the user, too.
    """
    asking = _asking(sys._getframe(2))
    if _is_internal(asking):
        return False
    frame: FrameType | None = asking
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") in _CALLING_HOOKS:
            # The innermost hook that Lightning calls; what is around it (`setup` of a script) has nothing to say.
            return name in _HOOK_CALLERS and frame.f_locals.get("hook_name") in _MAKING_DATA
        if name in _LOADERS and not _is_internal(frame):
            return True
        frame = frame.f_back
    return False


def _asking(frame: FrameType) -> FrameType:
    """Who asks, past the Trainer and the module, which pass on what they are asked."""
    while frame.f_code.co_name in _PASSING_ON.get(str(frame.f_globals.get("__name__")), ()) and frame.f_back:
        frame = frame.f_back
    return frame


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL


def find_replica(config: SMPConfig, module: nn.Module | None, num_ranks: int, rank: int) -> tuple[int, int]:
    """Readers of samples of their own among ``num_ranks``, and the number of this one, before the layout is made.

    Args:
        config: all options.
        module: what will be trained, as far as it is built; without a degree the stages depend on it.
        num_ranks: of the world.
        rank: this one.
    """
    if module is None or not dist.is_initialized():
        return num_ranks, rank
    try:
        shape = choose_shape(config, module, lambda text: None)
    except ConfigError:  # said when the layout is made
        return num_ranks, rank
    here = shape.coordinates(rank)
    replica = here["dp_replicate"] * shape.dp_shard + here["dp_shard"]
    if config.prescaled_batch:
        return shape.dp, replica
    return shape.dp * shape.tp, replica * shape.tp + here["tp"]
