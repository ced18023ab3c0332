"""Pipeline, sharded data and tensor parallelism for unmodified Lightning modules and Accelerate scripts.

``import torch`` imports this package on every machine where it is installed
(see :mod:`smp_strategy.integrations.autoload`), and Hydra reads its options before any model exists. So this file
imports nothing heavy: public names are imported at their first use, and the import itself only registers
``Trainer(strategy="smp")`` with Lightning.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from smp_strategy.integrations import autoload

if TYPE_CHECKING:
    from smp_strategy.activations.selection import set_activation_checkpointing as set_activation_checkpointing
    from smp_strategy.activations.submodules import checkpoint_sequential as checkpoint_sequential
    from smp_strategy.config.config import SMPConfig as SMPConfig
    from smp_strategy.data_parallel.ddp_comm_hook import HierarchicalAllReduceState as HierarchicalAllReduceState
    from smp_strategy.data_parallel.ddp_comm_hook import hierarchical_allreduce_hook as hierarchical_allreduce_hook
    from smp_strategy.engine.commands.offline_planning import plan_partition as plan_partition
    from smp_strategy.engine.engine import Engine as Engine
    from smp_strategy.engine.saving.tagged_checkpoints import resume_from_checkpoint as resume_from_checkpoint
    from smp_strategy.engine.saving.tagged_checkpoints import save_checkpoint as save_checkpoint
    from smp_strategy.errors import CheckpointError as CheckpointError
    from smp_strategy.errors import ConfigError as ConfigError
    from smp_strategy.errors import PeerFailedError as PeerFailedError
    from smp_strategy.errors import SMPError as SMPError
    from smp_strategy.errors import UnsupportedError as UnsupportedError
    from smp_strategy.integrations.accelerate.plugin import SMPPlugin as SMPPlugin
    from smp_strategy.integrations.lightning.monitor_callback import MonitorHooks as SMPMonitor
    from smp_strategy.integrations.lightning.strategy import StrategyHooks as SMPStrategy
    from smp_strategy.model.annotations import partition as partition
    from smp_strategy.model.annotations import set_partition as set_partition
    from smp_strategy.model.trace.device_model import Machine as Machine
    from smp_strategy.model.units import unit as unit
    from smp_strategy.tensor_parallel.plan.registry import tp_register as tp_register
    from smp_strategy.tensor_parallel.plan.registry import tp_register_with_module as tp_register_with_module
    from smp_strategy.tensor_parallel.plan.user_choices import set_tensor_parallelism as set_tensor_parallelism
    from smp_strategy.tensor_parallel.plan.user_choices import tensor_parallelism as tensor_parallelism

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "HierarchicalAllReduceState",
    "Machine",
    "PeerFailedError",
    "SMPConfig",
    "SMPError",
    "SMPMonitor",
    "SMPPlugin",
    "SMPStrategy",
    "UnsupportedError",
    "__version__",
    "checkpoint_sequential",
    "hierarchical_allreduce_hook",
    "partition",
    "plan_partition",
    "resume_from_checkpoint",
    "save_checkpoint",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
    "unit",
]
__version__ = "0.2.0"

_HOME = {
    "CheckpointError": "smp_strategy.errors",
    "ConfigError": "smp_strategy.errors",
    "Engine": "smp_strategy.engine.engine",
    "HierarchicalAllReduceState": "smp_strategy.data_parallel.ddp_comm_hook",
    "Machine": "smp_strategy.model.trace.device_model",
    "PeerFailedError": "smp_strategy.errors",
    "SMPConfig": "smp_strategy.config.config",
    "SMPError": "smp_strategy.errors",
    "SMPPlugin": "smp_strategy.integrations.accelerate.plugin",
    "UnsupportedError": "smp_strategy.errors",
    "checkpoint_sequential": "smp_strategy.activations.submodules",
    "hierarchical_allreduce_hook": "smp_strategy.data_parallel.ddp_comm_hook",
    "partition": "smp_strategy.model.annotations",
    "plan_partition": "smp_strategy.engine.commands.offline_planning",
    "resume_from_checkpoint": "smp_strategy.engine.saving.tagged_checkpoints",
    "save_checkpoint": "smp_strategy.engine.saving.tagged_checkpoints",
    "set_activation_checkpointing": "smp_strategy.activations.selection",
    "set_partition": "smp_strategy.model.annotations",
    "set_tensor_parallelism": "smp_strategy.tensor_parallel.plan.user_choices",
    "tensor_parallelism": "smp_strategy.tensor_parallel.plan.user_choices",
    "tp_register": "smp_strategy.tensor_parallel.plan.registry",
    "tp_register_with_module": "smp_strategy.tensor_parallel.plan.registry",
    "unit": "smp_strategy.model.units",
}

autoload.autoload()


def __getattr__(name: str) -> Any:
    if name in ("SMPMonitor", "SMPStrategy"):
        lightning = import_module("smp_strategy.integrations.lightning")
        return getattr(lightning, f"make_{name.removeprefix('SMP').lower()}")(_lightning_in_use())
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'smp_strategy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _lightning_in_use() -> str:
    """Lightning ships twice, with separate classes: the tree that this process has imported, else the newer one."""
    older_only = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if older_only or find_spec("lightning") is None else "lightning.pytorch"
