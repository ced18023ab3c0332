"""Python interpreters that have everything imported: ``subprocess`` forks this process where it would start one.

A fresh interpreter computes for seven seconds until Lightning is imported, and for some more in its first step. A
launcher does the same with a fork of a process that has done both: it makes the same command, environment, pipes and
signals, and the fork puts away what it has inherited before it runs the script of the command. ::

    with forked_interpreters():
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "script.py"])

Forks fork in the same way the processes that they start in turn. Once per launcher, a test starts real interpreters.
"""

import atexit
import faulthandler
import gc
import inspect
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  (what is imported here need not be in forks)
import torch

from smp_strategy.config import special_paths
from smp_strategy.testing import collecting_paused

__all__ = ["forked_interpreters"]

_ORIGINAL: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(_ORIGINAL)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


@contextmanager
def forked_interpreters() -> Iterator[None]:
    """While it lasts, this Python is forked where ``subprocess`` would start it, here and in the forks."""
    Popen: Any = subprocess.Popen
    Popen._execute_child = _execute_child
    try:
        yield
    finally:
        Popen._execute_child = _ORIGINAL


def _execute_child(self: Any, *positional: Any) -> None:
    given = _SIGNATURE.bind(self, *positional).arguments
    command = _command_of_this_python(given["args"])
    if command is None:
        _ORIGINAL(self, *positional)
        return
    for stream in (sys.stdout, sys.stderr):  # the fork would write what is in their buffers once more
        stream.flush()
    with collecting_paused():
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()
    if self.pid == 0:
        code = 1
        try:
            _put_away(given)
            code = _run(command)
        except BaseException:
            traceback.print_exc()
        finally:
            # No interpreter shutdown: a forked process shares threads' state with its parent.
            os._exit(code)
    self._child_created = True
    self._close_pipe_fds(*(given[name] for name in _PIPES))


def _command_of_this_python(arguments: Any) -> list[str] | None:
    """What follows this Python in a command: a script or ``-m`` and a module, and arguments; ``None``: not so."""
    if isinstance(arguments, str | bytes | os.PathLike):
        return None
    program, *command = map(os.fsdecode, arguments)
    if command[:1] == ["-u"]:  # lines are written at once anyway
        del command[0]
    is_script = bool(command) and (command[0] == "-m" or not command[0].startswith("-"))
    return command if program == sys.executable and is_script else None


def _put_away(given: Mapping[str, Any]) -> None:
    """Make this fork what a new process of ``Popen(given)`` is."""
    if given["start_new_session"]:
        os.setsid()
    for source, target in ((given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)):
        if source != -1:
            os.dup2(source, target)
    # Objects of the parent still know these numbers and close them when they are freed. So the numbers stay taken, or a
    # socket of the new program would get one.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (nothing, *given["pass_fds"]):
            os.dup2(nothing, number, inheritable=False)
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["env"] is not None:
        variables = dict(given["env"])
        os.environ.clear()
        os.environ.update(variables)
    _forget_signals_and_hooks()
    _forget_modules()
    _streams.extend([sys.stdin, sys.stdout, sys.stderr])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)  # type: ignore[misc]
    _forget_logging()
    _forget_frameworks()


# Kept: they would close descriptors that are others' by then.
_streams: list[Any] = []


def _forget_signals_and_hooks() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    atexit._clear()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")


def _forget_modules() -> None:
    """A script that has started this process has imported modules beside it, which its other ranks import as well."""
    for name, module in list(sys.modules.items()):
        if str(Path(getattr(module, "__file__", None) or "/").parent) in _folders:
            del sys.modules[name]


# Of the scripts that this process and those before it have run.
_folders: set[str] = set()


def _forget_logging() -> None:
    logging.root.handlers.clear()
    for name in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        if name in sys.modules:
            # As they do when they are imported where nobody logs; pytest does.
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [logging.StreamHandler()], False
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)


def _forget_frameworks() -> None:
    """What modules keep since they were imported, or since the launcher used them."""
    special_paths.STARTED_IN = os.getcwd()  # type: ignore[misc]
    torch.manual_seed(torch.Generator().initial_seed())
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if (module := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
        module.rank_zero_only.rank = int(rank)
    if (module := sys.modules.get("accelerate.state")) is not None:
        module.AcceleratorState._reset_state(reset_partial_state=True)
        module.GradientState._reset_state()
    if (module := sys.modules.get("hydra.core.global_hydra")) is not None:
        module.GlobalHydra.instance().clear()
    if (module := sys.modules.get("hydra.core.hydra_config")) is not None:
        module.HydraConfig.instance().cfg = None


def _run(command: Sequence[str]) -> int:
    """Exit code of this process once it has run ``command``."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folder = os.getcwd() if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    sys.path[:0] = [folder, *filter(None, paths)]
    sys.argv = list(command[1:] if command[0] == "-m" else command)
    _folders.add(folder)
    code: Any = None
    try:
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
