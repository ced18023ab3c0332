"""Profiling runs: ``smp profile FILE COMMAND`` measures the units of a job, and writes the partition to FILE.

The ranks that the command starts inherit a variable, which wins over the options of their program. After the report of
the first step all of them end the program, as ``sys.exit()`` in its loop would.
"""

import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Final

from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError

__all__ = ["VARIABLE", "end_if_profiled", "profiled", "run"]

VARIABLE: Final = "SMP_PROFILE"
FAILED: Final = 1


def run(given: Namespace) -> int:
    """Run ``smp profile``; return the exit status of the command, or 1 if it has not written the file.

    Raises:
        ConfigError: the command is missing.
        OSError: the command cannot be started.
    """
    command = given.arguments[given.arguments[:1] == ["--"] :]
    if not command:
        raise ConfigError("nothing to run. Give the command that trains: `smp profile partition.json python train.py`.")
    path = Path(given.partition).absolute()
    before = _state(path)
    status = subprocess.run(command, env={**os.environ, VARIABLE: str(path)}, check=False).returncode
    if status:
        return status
    if _state(path) == before:
        print(
            "smp profile: the command has ended without a training step on stages, so it measured nothing; or rank 0, "
            "which writes the file, is on another machine.",
            file=sys.stderr,
        )
        return FAILED
    print(
        f"{given.partition} has the partition by measured times: `smp explain {given.partition}` shows it.\n"
        f"Train with `load_partition=True, partition_file={given.partition!r}`, or SMP_LOAD_PARTITION=1 "
        f"SMP_PARTITION_FILE={given.partition}."
    )
    return 0


def _state(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_mtime_ns, path.stat().st_ino) if path.exists() else None


def profiled(config: SMPConfig) -> SMPConfig:
    """Options of this run: in a profiling run units are measured, and the partition is written.

    Raises:
        ConfigError: it is one, and the stages are set by hand.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return config
    if not config.auto_partition:
        raise ConfigError(
            "`smp profile` measures units to choose their stages, but `auto_partition=False` says that they are placed "
            "by hand. Leave that and `set_partition` out, or start the job without `smp profile`."
        )
    measured = replace(config, skip_tracing=False, trace_execution_times=True, trace_memory_usage=True)
    return replace(measured, partition_file=path, load_partition=False)


def end_if_profiled() -> None:
    """End a profiling run.

    Raises:
        SystemExit: it is one; the exit status is 0.
    """
    if os.environ.get(VARIABLE):
        raise SystemExit(0)
