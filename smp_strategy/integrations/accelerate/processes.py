"""The processes: how they reach each other.

The process group is Accelerate's own, unless it cannot carry what ranks tell each other.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from smp_strategy.errors import ConfigError

__all__ = ["ensure_group"]


def ensure_group(device: torch.device, timeout: timedelta | None) -> None:
    """Make a default process group if there is none, or one in the place of the default one that lacks the host.

    Accelerate makes groups for the accelerator alone (``nccl``), but ranks send tensors of the host as well. A script
    that has one process has none.

    Args:
        device: where this rank computes.
        timeout: of the group; ``None``: the backend's.

    Raises:
        ConfigError: a launcher has started several processes, but Accelerate takes each of them for the only one.
    """
    if not dist.is_initialized():
        started = os.environ.get("WORLD_SIZE", "1")
        if int(started) > 1:
            raise ConfigError(
                f"{started} processes were started, but Accelerate has found no accelerator for them, and each would "
                "train alone. Use Accelerator(cpu=True), ACCELERATE_USE_CPU=true, or `use_cpu: true` in the file of "
                "`accelerate launch` together with `smp_config`, to train on CPUs."
            )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    group = dist.distributed_c10d._get_default_group()
    carried = {each.type for each in group._device_types}
    if "cpu" in carried or device.type == "cpu":
        return
    backend = dist.get_backend(group)
    # The store lives on: in it the ranks find each other again, wherever it is served.
    store, rank, world_size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{backend}",
        store=dist.PrefixStore("smp_strategy", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
