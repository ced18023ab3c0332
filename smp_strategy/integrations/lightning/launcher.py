"""Start the other ranks of this machine, and end all of them together.

Lightning's launcher runs the script again for each further rank. Ours differs in these points:

1. In a Hydra sweep the ranks run the job that rank 0 runs (see :mod:`smp_strategy.integrations.lightning.command`), and
  the next
   job starts from a clean slate: number of ranks and everything else may differ from job to job.
2. What cannot be trained by so many ranks is refused before any is started.
3. An exception leaves on every rank with what the rank that failed first has said
  (:mod:`smp_strategy.distributed.failure`).
4. When one rank fails the others get a few seconds to say so, and are then ended, whichever rank it was
   (:mod:`smp_strategy.integrations.lightning.child_processes`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import new_class
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from smp_strategy.distributed.crash_report import keep_short, shorten
from smp_strategy.distributed.failure import blame
from smp_strategy.integrations.lightning.child_processes import GRACE_SECONDS, Children, end_with_launcher
from smp_strategy.integrations.lightning.command import child_command, running_hydra_job
from smp_strategy.integrations.lightning.tree import Tree

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as Host
else:
    Host = object  # make_launcher() adds the base class of the tree in use

__all__ = ["SMPLauncherHooks", "make_launcher", "start_new_job"]

_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What launching ranks for one Hydra job has changed in this process."""

    folder: str
    variables: dict[str, str | None]
    children: Children


# The environment, the children and the default process group belong to the process, so their record does too.
_jobs_of_this_process: list[_Job] = []


def start_new_job() -> None:
    """If this process launched ranks for an earlier job of a Hydra sweep, undo all of it.

    Must run before Lightning looks at the environment, i.e. while a strategy is constructed. Two trainers in one job
    (or in a script without Hydra) share their ranks; then this does nothing.
    """
    hydra = running_hydra_job()
    if not _jobs_of_this_process or hydra is None or _jobs_of_this_process[-1].folder == hydra.runtime.output_dir:
        return
    job = _jobs_of_this_process.pop()
    if dist.is_initialized():
        dist.destroy_process_group()
    job.children.end()
    for name, value in job.variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def make_launcher(tree: Tree, environment: Any, num_processes: int, num_nodes: int) -> "SMPLauncherHooks":
    """The launcher for one Lightning tree."""
    base = tree.pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
    launcher: type[SMPLauncherHooks] = new_class(
        "SMPLauncher", (SMPLauncherHooks, base), exec_body=lambda names: names.update(tree=tree)
    )
    return launcher(environment, num_processes, num_nodes)


class SMPLauncherHooks(Host):
    """See the module's docstring."""

    tree: Tree

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._children = Children(self.procs)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks if nobody else has, then call ``function`` on this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if trainer is not None:
                trainer.strategy.refuse_before_start(trainer)
            self._call_children_scripts()
            self._children.watch()
        end_with_launcher()
        self.tree.fabric("utilities.distributed")._set_num_threads_if_needed(num_processes=self.num_processes)
        keep_short()
        try:
            if trainer is not None:
                trainer.strategy.recover_checkpoints(trainer)
            return function(*args, **kwargs)
        except Exception as error:
            culprit = blame(error)
            shorten(culprit)
            if culprit is not error:
                raise culprit from None  # what this rank noticed of it would only stand in front
            raise

    def end_children(self, patience: float = GRACE_SECONDS) -> None:
        """Give the ranks that this process started ``patience`` seconds to end by themselves, then end them."""
        self._children.end(patience)

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        before = {name: os.environ.get(name) for name in _VARIABLES}
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK=str(environment.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        for local_rank in range(1, self.num_processes):
            command, folder = child_command(local_rank)
            rank = environment.node_rank() * self.num_processes + local_rank
            self._children.start(rank, command, {**os.environ, "LOCAL_RANK": str(local_rank)}, folder)
        if (hydra := running_hydra_job()) is not None:
            job = _Job(folder=hydra.runtime.output_dir, variables=before, children=self._children)
            _jobs_of_this_process.append(job)
