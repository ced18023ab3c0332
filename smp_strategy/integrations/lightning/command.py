"""The command that starts another rank of the running script.

For a plain script that is the script with its arguments. A Hydra app is harder: rank 0 may be one job of a sweep
(``-m smp=pp2,pp4``), and the same arguments would start the whole sweep again, in other directories. So a rank is
told to run exactly the job that rank 0 is running: its overrides, in its directory, without writing a config there.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from smp_strategy.config.start_folder import STARTED_IN

__all__ = ["child_command", "running_hydra_job"]

# What rank 0's own command says about directories, sweeps and launchers must not reach the other ranks.
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
    """The command for a rank of this machine and the folder to run it in: that of rank 0 (``None``: this one)."""
    import __main__

    job = running_hydra_job()
    # The script may have gone elsewhere meanwhile, and will do so again.
    folder = STARTED_IN if job is None else job.runtime.cwd
    if __main__.__spec__ is not None:
        script = ["-m", __main__.__spec__.name.removesuffix(".__main__")]
    else:
        script = [os.path.join(folder or os.getcwd(), sys.argv[0])]
    if job is None:
        return [sys.executable, *script, *sys.argv[1:]], folder
    arguments = _hydra_arguments(job, config_flags(sys.argv[1:]), local_rank)
    return [sys.executable, *script, *arguments], folder


def config_flags(arguments: Sequence[str]) -> list[str]:
    """Those of Hydra's arguments that say where its configs are."""
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
