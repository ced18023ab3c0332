"""Lifecycle of a run, at every door: it begins on all ranks with the same settings, and leaves no thread behind.

A rank whose options come from another file, variable or branch trains on: replicas clip by other norms, stages cut
other microbatches. So each door writes down what changes numbers or the number of steps, under the words in which the
user has given it, and notes it for comparison (:mod:`smp_strategy.distributed.agreement.ledger`).
"""

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import failure
from smp_strategy.distributed.agreement.common_settings import shown
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import SETTINGS
from smp_strategy.distributed.door_words import speak
from smp_strategy.distributed.malloc import keep_freed_memory
from smp_strategy.distributed.process_groups import carry_host_tensors
from smp_strategy.distributed.shutdown import call_at_exit
from smp_strategy.engine.lifecycle.first_meeting import init_method
from smp_strategy.errors import ConfigError, DoorWords

__all__ = [
    "begin_run",
    "ensure_group",
    "fail_run",
    "leave_at_exit",
    "note_settings",
    "of_fields",
    "of_options",
    "of_process",
]

# Variables of others that change numbers or steps. Those of this package are options, which are compared as such.
_VARIABLES: Final = (
    *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_SPLIT_BATCHES"),
    *("ACCELERATE_DISPATCH_BATCHES", "ACCELERATE_EVEN_BATCHES", "ACCELERATE_USE_SEEDABLE_SAMPLER", "PL_SEED_WORKERS"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)


def of_fields(source: Any, names: Iterable[str], title: str) -> dict[str, str]:
    """Settings of the attributes ``names`` of ``source``, as far as it has them."""
    return {title.format(name): shown(getattr(source, name)) for name in names if hasattr(source, name)}


def of_options(config: SMPConfig, title: str) -> dict[str, str]:
    """All options of this package; ``title`` as for :func:`of_fields`."""
    # Rank 0 reads the file of the partition, which may be on its disk only.
    names = [field.name for field in dataclasses.fields(config) if field.name != "partition_file"]
    return of_fields(config, names, title)


def of_process(*packages: str) -> dict[str, str]:
    """Settings of this process that change numbers: versions, modes of torch, variables of the environment."""
    loaded = {name: sys.modules.get(name) for name in ("smp_strategy", "torch", *packages)}
    found = {f"the version of {name}": str(getattr(each, "__version__", None)) for name, each in loaded.items()}
    found["`torch.get_default_dtype()`"] = shown(torch.get_default_dtype())
    found["`torch.get_float32_matmul_precision()`"] = torch.get_float32_matmul_precision()
    found["`torch.are_deterministic_algorithms_enabled()`"] = shown(torch.are_deterministic_algorithms_enabled())
    return found | {f"the environment variable {name}": os.environ[name] for name in _VARIABLES if name in os.environ}


def note_settings(settings: Mapping[str, str], ledger: Ledger | None = None) -> Ledger:
    """Let the next comparison of the ledger that is returned include ``settings``; ``None``: a new one."""
    return (ledger or Ledger()).note(SETTINGS, settings)


def ensure_group(
    device_type: str, backend: str, *, timeout: timedelta | None = None, is_launched: bool = False
) -> None:
    """Make the default process group if there is none. It carries tensors of the host in any case.

    Without a launcher, which says which rank this is, this rank is the only one.

    Raises:
        ConfigError: a variable of the launcher is missing, or no number.
    """
    if not dist.is_initialized() and is_launched:
        _check_launcher()
        dist.init_process_group(backend, init_method=init_method(), timeout=timeout)
    elif not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    carry_host_tensors(device_type)
    if device_type == "cpu":
        keep_freed_memory()


def _check_launcher() -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name)
        if text is None or not text.strip().isdecimal():
            found = "is not set" if text is None else f"is {text!r}"
            raise ConfigError(
                f"The environment variable {name} must be a whole number, but {found}. Start the ranks by a launcher, "
                "which sets it (`torchrun --nproc-per-node 2 script.py`), or take RANK out for a single rank."
            )


def begin_run(words: DoorWords) -> None:
    """Begin a run, on all ranks equally often: failures of earlier ones are over, and errors are in these ``words``."""
    failure.begin_run()
    speak(words)


def fail_run(error: BaseException) -> None:
    """Tell the other ranks that ``error`` ends the run."""
    failure.publish_own(error)


def leave_at_exit(close: Callable[[], bool]) -> None:
    """Call the bound method ``close`` when the process ends; drop all process groups if it returns true.

    See [Note: leaving] in :mod:`smp_strategy.distributed.shutdown`.
    """
    call_at_exit(close, then=_drop_groups)


def _drop_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # objects of earlier runs may hold groups, too
