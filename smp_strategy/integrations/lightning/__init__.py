"""PyTorch Lightning integration: :class:`SMPStrategy`, for either of Lightning's two trees.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with unrelated classes. So a strategy
class is made per tree, from the same code; nothing here imports Lightning before a tree is named. In reading order::

    strategy, delegating_strategy   Lightning's Strategy API: a run, its steps, data and collectives; calls for parts
    tree                            classes for one of the two trees; lazy imports from it
    validation                      unsupported Lightning features
    steps                           a step per microbatch, merged into one result; what it does to its batch
    logging                         self.log, self.print and loggers: recorded in steps, logged once
    metrics, metric_values          torchmetrics objects, also as a loss; their values for the whole batch
    user_hooks                      module and callback hooks see the weights of all stages
    precision_plugin                loss scaling and clipping over all ranks
    manual_optimization             backward and optimizer calls of the user's step, once per batch
    monitor_callback                SMPMonitor: speed, memory and waiting for loggers; NaN and infinity
    data, world_size                the data stream of a replica; ranks for Lightning, replicas for users
    checkpoint_hooks                save and load
    streamed_checkpoint             full checkpoints that no rank has as a whole
    resume, resume_progress         exact resumption; counters, positions and means in the middle of an epoch
    launcher, child_processes       start the ranks of a machine, watch and end them
    joining                         ranks meet, compare their settings, and join the process group
    environment, sigterm            submitit, torchrun, backends; stop all ranks before the same step
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_strategy.integrations.lightning.monitor_callback import MonitorHooks as SMPMonitor
    from smp_strategy.integrations.lightning.monitor_callback import make_monitor
    from smp_strategy.integrations.lightning.strategy import StrategyHooks as SMPStrategy
    from smp_strategy.integrations.lightning.strategy import make_strategy

__all__ = ["SMPMonitor", "SMPStrategy", "make_monitor", "make_strategy"]

_HOME = {"strategy": "strategy", "monitor": "monitor_callback"}


def __getattr__(name: str) -> Any:
    # Imported at their first use: parts of this package are used where Lightning is not needed.
    if name in __all__:
        kind = name.removeprefix("SMP").removeprefix("make_").lower()
        make = getattr(import_module(f"{__name__}.{_HOME[kind]}"), f"make_{kind}")
        return make("lightning.pytorch") if name.startswith("SMP") else make
    raise AttributeError(f"module 'smp_strategy.integrations.lightning' has no attribute {name!r}")
