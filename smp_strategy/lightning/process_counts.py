"""What `trainer.world_size` and `strategy.num_processes` count: ranks to Lightning, replicas to everybody else.

User code divides a batch by them, multiplies a learning rate by them, or deals out samples with them, and means: by how
many readers of other samples. All ranks that run one replica read the same samples, so they count as one. Lightning's
own code asks them whether there are other processes at all, whom it has to wait for or to tell something.

So the answer depends on who asks, which the stack tells.
"""

import sys

import torch.distributed as dist
from torch import nn

from smp_strategy.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.shape import choose_shape

__all__ = ["asked_by_lightning", "count_replicas"]

_INTERNAL = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "smp_strategy"})
_TRAINERS = frozenset({"lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"})


def asked_by_lightning() -> bool:
    """Whether the code that asks for the property that calls this is Lightning's, or ours."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") in _TRAINERS and frame.f_code.co_name == "world_size" and frame.f_back:
        frame = frame.f_back  # the Trainer passes on what it is asked
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL


def count_replicas(config: SMPConfig, module: nn.Module | None, num_ranks: int) -> int:
    """Readers of samples of their own among ``num_ranks``, before the layout is made.

    Args:
        config: all options.
        module: what will be trained, as far as it is built; without a degree the stages depend on it.
        num_ranks: of the world.
    """
    if module is None or not dist.is_initialized():
        return num_ranks
    try:
        shape = choose_shape(config, module, lambda text: None)
    except ConfigError:  # said when the layout is made
        return num_ranks
    return shape.dp * (1 if config.prescaled_batch else shape.tp)
