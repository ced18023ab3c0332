"""Accelerate integration: unchanged training loops under any layout.

Reading order::

    launch.py, launch_options.py          patches of `accelerate launch`; `smp_config` becomes SMP_* variables
    own_options.py                        options that only scripts with Accelerate have
    plugin.py                             SMPPlugin, which adds the hooks to an Accelerator under construction
    validation.py                         errors about unsupported options, models and optimizers
    session.py                            Session, the state that all hooks share; HookBase; compared settings
    training.py                           prepare, clipping, unscaling, free_memory, end_training
    optimizer.py, no_sync.py              optimizer and scheduler wrappers; gradient accumulation
    data.py                               loaders: sharded over replicas, same batches within a replica
    collectives.py                        gather, reduce and their like over data ranks
    saving.py                             full state dicts of models and optimizers, and files of them
    save_state.py                         save_state and load_state, full or sharded, also asynchronous
    state_files.py                        Accelerate's own files
    rng_files.py                          RNG states in these files
    hf_trainer.py                         Hugging Face's Trainer
    tracker_monitor.py                    SMPMonitor: speed, memory and waiting, for trackers and the Trainer

The launcher imports a part of this package before any model exists, so public names are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_strategy.integrations.accelerate.session import Session as Session
    from smp_strategy.integrations.accelerate.tracker_monitor import TrackerMonitor as SMPMonitor

__all__ = ["SMPMonitor", "Session"]

_HOME = {"Session": "smp_strategy.integrations.accelerate.session"}


def __getattr__(name: str) -> Any:
    if name == "SMPMonitor":
        return import_module(f"{__name__}.tracker_monitor").make_tracker_monitor()
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
