"""OmegaConf resolvers for configuration files: ``${smp_now:%H-%M}``, ``${smp_rank0:.hydra}``, ...

Hydra names the run directory by the clock. Under ``torchrun`` or ``srun`` every rank composes its own configuration,
so every rank would read its own clock and open its own directory. Here the ranks agree on one time before they format
it: under ``torchrun`` through the store that the launcher serves, under SLURM by the job's start time. The store keeps
the time, so later calls in the same run get the same one. So do ranks that torchrun restarts: they go on in the
directory of their checkpoints. (A directory for each restart would be another one on each node: nodes count their own.)
"""

import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from smp_strategy.config.recipe import named_replicas
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.hydra.sagemaker_layout import option_in_file

__all__ = ["agreed_start_time", "divide", "global_rank", "num_ranks", "register_resolvers", "with_rank"]

_SEVERAL = re.compile(r"\+*smp=\[([^,\]]+(?:,[^,\]]+)+)\]")
STORE_KEY = "smp_strategy/start_time"
STORE_TIMEOUT = timedelta(seconds=60)


def register_resolvers() -> None:
    """Register the six resolvers with OmegaConf; may be called repeatedly.

    ``smp_now``         start time of the run in ``strftime`` format, the same on every rank
    ``smp_rank0``       its argument on global rank 0, ``null`` elsewhere
    ``smp_ranksuffix``  its argument, followed by ``_rank1`` and so on on the other ranks
    ``smp_divide``      integer quotient of two numbers; a remainder is an error
    ``smp_sagemaker``   option in a JSON file of SageMaker's library
    ``smp_num_ranks``   minimum number of ranks of a node of the group ``smp``; ``null`` if it is unspecified
    """
    environ = os.environ
    OmegaConf.register_new_resolver(
        "smp_now",
        lambda pattern: datetime.fromtimestamp(agreed_start_time(environ)).strftime(pattern),
        use_cache=True,
        replace=True,
    )
    OmegaConf.register_new_resolver(
        "smp_rank0", lambda value: value if global_rank(environ) == 0 else None, replace=True
    )
    OmegaConf.register_new_resolver("smp_ranksuffix", lambda name: with_rank(name, global_rank(environ)), replace=True)
    OmegaConf.register_new_resolver("smp_divide", divide, replace=True)
    OmegaConf.register_new_resolver("smp_sagemaker", option_in_file, replace=True)
    OmegaConf.register_new_resolver("smp_num_ranks", lambda node: num_ranks(node, _chosen_layout()), replace=True)


def with_rank(name: str, rank: int) -> str:
    """Return ``name`` for rank 0 and ``name_rank1`` for rank 1; our launcher may have added the suffix already."""
    suffix = f"_rank{rank}" if rank else ""
    return name if name.endswith(suffix) else name + suffix


def global_rank(environ: Mapping[str, str]) -> int:
    """Rank of this process as set by the launcher; 0 without a launcher."""
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if variable in environ:
            return int(environ[variable])
    return 0


def agreed_start_time(environ: Mapping[str, str]) -> float:
    """Start time in seconds since the epoch, the same on every rank of a run."""
    given = environ.get("SMP_START_TIME")
    if given is not None:
        with suppress(ValueError):
            if math.isfinite(seconds := float(given)):
                return seconds
        raise ConfigError(f"SMP_START_TIME must be seconds since the epoch, but is {given!r}.")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _from_agent_store(environ)
    return float(environ.get("SLURM_JOB_START_TIME", time.time()))


def _from_agent_store(environ: Mapping[str, str]) -> float:
    from torch.distributed import TCPStore  # imported here so that composing a configuration does not import torch

    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=STORE_TIMEOUT,
    )
    return float(store.compare_set(STORE_KEY, "", str(time.time())))


def divide(whole: int, parts: int) -> int:
    """Integer quotient ``whole / parts``; a remainder is an error."""
    if parts < 1 or whole % parts:
        raise ConfigError(f"{whole} does not divide into {parts} equal parts. Choose numbers that do.")
    return whole // parts


def num_ranks(layout: Mapping[str, Any], name: str) -> int | None:
    """Minimum number of ranks of ``layout``: product of pipeline, tensor and shard degree and number of replicas.

    Its recipe name names replicas (``mics2x4``: four). Sharding optimizer state takes two. ``None``: the number of
    stages is that of the ranks.
    """
    if "_args_" in layout:
        raise ConfigError(
            f"`smp._args_={list(layout['_args_'])}`: every option has a name. Write `smp.NAME=VALUE`; `smp=base --cfg "
            "job` shows all names."
        )
    stages = layout.get("pipeline_parallel_degree")
    shards, deals_out = layout.get("sharded_data_parallel_degree", 1), layout.get("shard_optimizer_state")
    parts = layout.get("tensor_parallel_degree", 1)
    if stages is None and shards == parts == 1 and not deals_out:
        return None
    return (stages or 1) * parts * shards * max(named_replicas(name), 2 if deals_out else 1)


def _chosen_layout() -> str:
    if not HydraConfig.initialized():
        return ""
    known = HydraConfig.get()
    for override in known.overrides.task:  # of several Hydra knows no choice
        if (several := _SEVERAL.fullmatch(override)) is not None:
            names = [name.strip() for name in several[1].split(",")]
            raise ConfigError(
                f"`{override}` names {len(names)} layouts. Each has all options, so only the last would count. Name "
                f"one: `smp={'_'.join(names)}`."
            )
    return known.runtime.choices.get("smp") or ""
