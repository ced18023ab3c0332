"""Run a script as if it had been started, without the ten seconds of computing that it takes to import Lightning.

A forked process has imported everything already. What starts ranks by itself, or is about starting them, runs in forks
that a launcher starts (:mod:`tests.interpreters`), and once per launcher in real processes.
"""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_only

from smp_strategy.testing import collecting_paused, free_port

__all__ = ["run_script"]

TIMEOUT_SECONDS = 280.0


def run_script(folder: Path, script: Path, *arguments: str, ranks: int = 1) -> str:
    """What ``python script arguments`` prints in ``folder``; with several ``ranks``, as under ``torchrun``."""
    told = folder / "told.txt"
    told.write_text("")
    port = free_port()
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_as_main, args=(script, arguments, told, _environment(rank, ranks, port)))
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with collecting_paused():
        for process in processes:
            process.start()
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGABRT)  # it shows its stack
            process.join()
    assert [process.exitcode for process in processes] == [0] * ranks, told.read_text()[-3000:]
    return told.read_text()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    variables = {name: str(number) for name, number in numbers.items()}
    return {**variables, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}


def _as_main(script: Path, arguments: tuple[str, ...], told: Path, environment: dict[str, str]) -> None:
    gc.freeze()
    gc.enable()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", 0))  # Lightning has looked when it was imported
    os.chdir(told.parent)
    # The end of a file that all ranks write to, line by line.
    sys.stdout = sys.stderr = told.open("a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    # No `dump_traceback_later`: processes that this one forks would wait for its thread, which they do not have.
    faulthandler.enable(file=2)
    warnings.resetwarnings()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    # No interpreter shutdown: a forked process shares atexit handlers and threads' state with pytest.
    os._exit(code)
