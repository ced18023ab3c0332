"""Launcher: starts the other ranks of this machine as subprocesses, and ends all of them together.

Like Lightning's launcher it runs the script again for each further rank. It differs in these points:

1. In a Hydra sweep (``-m smp=pp2,pp4``) a rank runs exactly the job of rank 0: its overrides, in its directory, without
   writing a config there. The arguments of rank 0 would start the whole sweep again. The next job starts from a clean
   slate, as the number of ranks may differ between jobs.
2. Degrees that do not fit the number of ranks are refused before any rank is started, and so is `mpirun` without
   `mpi4py`.
3. Every rank raises the error of the rank that failed first (:mod:`smp_strategy.distributed.failure`).
4. When a rank fails, the others get a few seconds to report errors of their own, and are then ended
   (:mod:`smp_strategy.integrations.lightning.child_processes`).
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from smp_strategy.config.mpi_variables import ranks_of_mpi
from smp_strategy.config.special_paths import started_in
from smp_strategy.engine.lifecycle.crash_report import culprit_of, keep_short
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.lightning.child_processes import GRACE_SECONDS, Children, end_with_launcher
from smp_strategy.integrations.lightning.tree import Tree

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as Host
else:
    Host = object  # make_launcher() adds the base class of the tree in use

__all__ = ["SMPLauncherHooks", "child_command", "make_launcher", "running_hydra_job", "start_new_job"]

# Overrides of rank 0's own command that must not reach the other ranks.
_OWN = (
    "hydra.run.",
    "hydra.sweep.",
    "hydra.sweeper",
    "hydra.launcher",
    "hydra.mode",
    "hydra.job.",
    "hydra.output_subdir",
)
_CONFIG_FLAGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")


def running_hydra_job() -> Any | None:
    """Hydra's own config while a Hydra app runs a job, else ``None``."""
    hydra = sys.modules.get("hydra.core.hydra_config")  # imported by every app that is one
    return hydra.HydraConfig.get() if hydra is not None and hydra.HydraConfig.initialized() else None


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """The command for a rank of this machine, and its working directory: rank 0's (``None``: the current one)."""
    import __main__

    job = running_hydra_job()
    # The script may have changed its working directory since, and will do so again.
    folder = started_in() if job is None else job.runtime.cwd
    if __main__.__spec__ is not None:
        script = ["-m", __main__.__spec__.name.removesuffix(".__main__")]
    else:
        script = [os.path.join(folder or os.getcwd(), sys.argv[0])]
        known = os.path.abspath(getattr(__main__, "__file__", script[0]))
        if not os.path.exists(script[0]) and os.path.basename(known) == os.path.basename(script[0]):
            script = [known]
    if job is None:
        return [sys.executable, *script, *sys.argv[1:]], folder
    arguments = _hydra_arguments(job, config_flags(sys.argv[1:]), local_rank)
    return [sys.executable, *script, *arguments], folder


def config_flags(arguments: Sequence[str]) -> list[str]:
    """The command line arguments that locate Hydra's configs."""
    kept: list[str] = []
    follows = False
    for argument in arguments:
        if follows or argument.split("=")[0] in _CONFIG_FLAGS:
            kept.append(argument)
            follows = not follows and "=" not in argument
    return kept


def _hydra_arguments(job: Any, flags: Iterable[str], local_rank: int) -> list[str]:
    folder = job.runtime.output_dir.replace("\\", "\\\\").replace('"', '\\"')
    # Overrides of a group (hydra/launcher=...) and of a value (hydra.launcher.x=...) are written differently.
    others = [
        text for text in job.overrides.hydra if not text.lstrip("+~").replace("hydra/", "hydra.").startswith(_OWN)
    ]
    arguments = [
        *flags,
        *job.overrides.task,
        *others,
        "hydra.mode=RUN",
        f'hydra.run.dir="{folder}"',
        "hydra.output_subdir=null",
        f"hydra.job.name={job.job.name}_rank{local_rank}",
    ]
    # Only the jobs of a sweep have a number; configs may refer to it.
    if "num" in job.job and job.job.get("num") is not None:
        arguments += [f"hydra.job.num={job.job.num}", f"hydra.job.id='{job.job.id}'"]
    return arguments


_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Changes that launching the ranks of a Hydra job has made in this process."""

    folder: str
    variables: dict[str, str | None]
    children: Children


# The environment, the children and the default process group belong to the process, so their record does too.
_jobs_of_this_process: list[_Job] = []


def start_new_job() -> None:
    """Undo the launch of an earlier job of a Hydra sweep: process group, children, environment variables.

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
    launcher: SMPLauncherHooks = tree.subclass("SMPLauncher", SMPLauncherHooks, base)(
        environment, num_processes, num_nodes
    )
    return launcher


def refuse_ranks_of_mpi(environ: Mapping[str, str]) -> None:
    """Refuse ``mpirun`` where Lightning does not know of it: every process would start a run of its own."""
    started = ranks_of_mpi(environ).get("WORLD_SIZE", "1")
    if started != "1":
        raise ConfigError(
            f"`mpirun` has started {started} processes, but Lightning learns their ranks from `mpi4py` only, which "
            "this environment does not have, or which is built for another MPI. Install it, or start the script with "
            "`torchrun`."
        )


class SMPLauncherHooks(Host):
    """Subprocess launcher for the ranks of this machine."""

    tree: Tree

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._children = Children(self.procs)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks, unless a cluster launcher has, then call ``function`` on this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            refuse_ranks_of_mpi(os.environ)
            if trainer is not None:
                trainer.strategy.refuse_before_start(trainer)
            self._call_children_scripts()
            self._children.watch()
        else:
            self._refuse_other_number()
        end_with_launcher()
        self.tree.fabric("utilities.distributed")._set_num_threads_if_needed(num_processes=self.num_processes)
        keep_short()
        try:
            if trainer is not None:
                trainer.strategy.recover_checkpoints(trainer)
            return function(*args, **kwargs)
        except Exception as error:
            culprit = culprit_of(error)
            if culprit is not error:
                raise culprit from None  # the consequence on this rank would only hide the cause
            raise

    def _refuse_other_number(self) -> None:
        """Refuse processes of a cluster launcher that are more or fewer than the Trainer's devices."""
        started, wanted = self.cluster_environment.world_size(), self.num_processes * self.num_nodes
        if started != wanted:
            raise ConfigError(
                f"`Trainer(devices={self.num_processes}, num_nodes={self.num_nodes})` needs {wanted} processes, but "
                f"the launcher has started {started}. Give it the other number, or change the Trainer's."
            )

    def lost(self) -> str:
        """A sentence about a rank that will not begin the run; empty: there is none."""
        return self._children.lost()

    def end_children(self, patience: float = GRACE_SECONDS) -> None:
        """Wait ``patience`` seconds for the ranks that this process started, then end them."""
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
