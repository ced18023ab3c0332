"""Cluster environments: number of processes on this machine, backend, and submitit's local executor.

Lightning detects its own launcher, torchrun and SLURM. Three cases are missing:

1. On CPUs ``devices`` is 1 unless the script repeats the number of processes that torchrun or mpirun has started, and
   Lightning fails with an IndexError; the number is taken from the launcher instead.
2. Submitit's local executor (``hydra/launcher=submitit_local``) starts one process per rank, unnoticed by Lightning.
3. Several processes may share the only accelerator of a machine.
"""

import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_strategy.config.mpi_variables import ranks_of_mpi
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.lightning.tree import Tree

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment as Host
else:
    Host = object  # submitit_environment() adds the base class of the tree in use

__all__ = ["backend_for", "devices_of_launcher", "submitit_environment"]


def devices_of_launcher(devices: list[torch.device]) -> list[torch.device]:
    """The devices of this machine when another launcher has started as many processes, else an error."""
    told_by, number = _started_here() or ("", len(devices))
    started = int(number)
    if started == len(devices):
        return devices
    # "auto" and 1 are the same thing on CPUs, and where there is one accelerator.
    if len(devices) == 1 and (devices[0].type == "cpu" or torch.accelerator.device_count() == 1):
        return devices * started
    raise ConfigError(
        f"`Trainer(devices={len(devices)})` must be the number of processes that the launcher started on this machine "
        f"({told_by}), but that is {started}. Pass `devices={started}` or start {len(devices)} processes."
    )


def _started_here() -> tuple[str, str] | None:
    """The setting that tells the number of processes on this machine, and the number; ``None``: nothing does."""
    of_mpi = ranks_of_mpi(os.environ)
    told = {
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE"),
        "hydra.launcher.tasks_per_node": os.environ.get("SUBMITIT_LOCAL_NTASKS"),
        # Lightning's launcher may have started other ranks of a single process of mpirun.
        "`mpirun -n`": of_mpi.get("LOCAL_WORLD_SIZE") if of_mpi.get("WORLD_SIZE") != "1" else None,
    }
    return next(((name, number) for name, number in told.items() if number), None)


def backend_for(devices: Sequence[torch.device]) -> str:
    """The process group backend for ``devices``, which are those of this machine.

    CPU tensors use gloo. Accelerator tensors use the device's default (NCCL), unless ranks share an accelerator.
    """
    kind = devices[0].type if devices else "cpu"
    if kind == "cpu" or len(set(devices)) < len(devices):
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map.get(kind, 'gloo')}"


def submitit_environment(tree: Tree) -> Any | None:
    """The cluster environment of submitit's local executor, or ``None`` if it did not start this process."""
    if "SUBMITIT_LOCAL_GLOBALID" not in os.environ:
        return None
    return tree.subclass("SubmititEnvironment", SubmititHooks, tree.fabric("plugins").ClusterEnvironment)()


class SubmititHooks(Host):
    """Cluster environment of submitit's local executor: one machine, ranks from ``SUBMITIT_LOCAL_*``."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: submitit starts all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """The local host, since the executor has one machine."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """A port derived from the job's id, the same on all ranks."""
        return 15_000 + zlib.crc32(os.environ["SUBMITIT_LOCAL_JOB_ID"].encode()) % 20_000

    @staticmethod
    def detect() -> bool:
        """Whether submitit's local executor started this process."""
        return "SUBMITIT_LOCAL_GLOBALID" in os.environ

    def world_size(self) -> int:
        """The number of tasks of the job."""
        return int(os.environ["SUBMITIT_LOCAL_NTASKS"])

    def set_world_size(self, size: int) -> None:
        """Ignored: submitit has set it."""

    def global_rank(self) -> int:
        """The number of this task."""
        return int(os.environ["SUBMITIT_LOCAL_GLOBALID"])

    def set_global_rank(self, rank: int) -> None:
        """Ignored: submitit has set it."""

    def local_rank(self) -> int:
        """The number of this task on its machine."""
        return int(os.environ["SUBMITIT_LOCAL_LOCALID"])

    def node_rank(self) -> int:
        """The number of the machine."""
        return int(os.environ.get("SUBMITIT_LOCAL_NODEID", 0))
