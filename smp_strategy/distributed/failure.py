"""First-failure report: every rank shows the error of the rank that failed first.

When one rank fails, the others fail a moment later with "connection closed by peer", and those secondary errors are
what people read first. So the rank that fails writes its error to the store of the process group before its connections
close; for a rank that was killed, the process that started it does, or a rank of its machine that sees how it ended. A
rank whose connection breaks reads that error and raises it.

If the process that serves the store is gone, any call of the store prints a screen of C++ frames. So a connection of
our own, which prints nothing, checks first whether it is there. The store may also live in a rank that is stopped, and
a call of it would never return. So it is called by a thread, which is given up after some seconds
(:mod:`smp_strategy.distributed.background_call`).

Functions with an argument ``store`` only access it; :func:`blame` decides which rank is to blame for an exception.

[Note: failures of a run] A script may catch an error and train again, and its ranks begin the next run at different
times. So a failure has the number of its run (:func:`begin_run`), and says nothing to a rank that is in a later one. A
failure that ends a process has the number 0 and is always read.
"""

import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from smp_strategy.distributed.background_call import BackgroundCall
from smp_strategy.distributed.peer_processes import (
    PeerProcess,
    exit_code_of,
    has_ended,
    how_it_ended,
    is_exiting,
    process_space,
)
from smp_strategy.distributed.torch_private import default_store
from smp_strategy.errors import MORE, PeerFailedError, SMPError

__all__ = [
    "FATAL",
    "begin_run",
    "blame",
    "current_run",
    "first_failure",
    "introduce",
    "is_library",
    "publish",
    "publish_own",
    "raise_lost",
    "shortened",
]

FATAL: Final = 0
"""Number of the run for a failure that ends the process."""

_FIRST = "smp_strategy/first_failure"
_PROCESSES: Final = "smp_strategy/processes"
# Signals with which launchers end the other ranks after a failure.
_CONSEQUENCES: Final = frozenset((signal.SIGTERM, signal.SIGINT))
# A rank that fails publishes before its sockets close; this covers the delay between the two.
_PATIENCE_SECONDS = 2.0
# A process that ends later may be a consequence: launchers look ten times a second, and end the others.
_CAUSE_SECONDS: Final = 0.1
# Timeout for a connection to the process that serves the store.
_CONNECT_SECONDS: Final = 1.0
_THIS_MACHINE: Final = ("127.0.0.1", "localhost")
# Timeout for an answer of the store.
_ANSWER_SECONDS: Final = 5.0
_BROKEN_CONNECTION = ("gloo", "nccl", "connection", "socket", "broken pipe", "pair closure", "recvbytes", "sendbytes")
# Most lines of a message: that of an error in a process of a data loader contains a traceback.
_NUM_LINES: Final = 3
# Most letters of a line, of which a rank prints one: some errors have a whole tensor in them.
_NUM_LETTERS: Final = 2000
# Libraries whose frames tell a user little.
_LIBRARIES: Final = frozenset(
    ("torch", "smp_strategy", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "hydra")
) | {"contextlib", "runpy", "threading", "concurrent"}

# Number of the present run of each default process group.
_RUNS: "Final[WeakKeyDictionary[dist.ProcessGroup, int]]" = WeakKeyDictionary()


def introduce() -> None:
    """Tell the other ranks which process this rank is, so that those of its machine can see how it ends."""
    store: Any = default_store()  # `append` lacks in torch's types
    with suppress(RuntimeError):  # not all stores can append; then nobody looks
        store.append(f"{_PROCESSES}/{process_space()}", PeerProcess.of(dist.get_rank(), os.getpid()).encode())


def begin_run() -> None:
    """Begin a run, on all ranks equally often; failures of earlier runs are over. See [Note: failures of a run]."""
    world = dist.group.WORLD
    assert world is not None
    _RUNS[world] = current_run() + 1


def current_run() -> int:
    """Number of the present run, from 1 on."""
    world = dist.group.WORLD
    return 1 if world is None else _RUNS.get(world, 1)


def publish(store: dist.Store, rank: int, text: str, run: int = FATAL) -> bool:
    """Publish ``text``, the error of ``rank``, for the other ranks, unless a rank has failed before.

    Args:
        store: Store of the process group.
        rank: Rank that has failed.
        text: Its error.
        run: Run in which it has failed; :data:`FATAL`: its process has ended, or is about to.

    Returns:
        Whether no other rank has failed before, as far as can be known.
    """
    # The store may live in a process that has ended already; then nobody is left to read it.
    with suppress(Exception):
        first = first_failure(store, current_run())
        if first is None or run == FATAL:  # a later run must know of an end that is only a consequence in this one
            set_first = store.compare_set(_key(run), "", f"rank {rank} failed first: {text}").decode()
            first = first or set_first
        return first.startswith(f"rank {rank} ")
    return True


def publish_own(error: BaseException, *, is_fatal: bool = False) -> bool:
    """Publish ``error``, with which this rank has failed in the present run.

    Returns:
        Whether it is the first failure: no other rank has failed before, and it is not about another rank.
    """
    if isinstance(error, PeerFailedError):
        return False
    store = _store_in_reach()
    if store is None:
        return True
    run = FATAL if is_fatal else current_run()
    call = BackgroundCall(lambda: publish(store, dist.get_rank(), _summary(error), run))
    return not call.within(_ANSWER_SECONDS) or call.get()


def first_failure(store: dist.Store, run: int) -> str | None:
    """Error that the rank that failed first in ``run`` has published, or ``None``. Does not wait."""
    with suppress(Exception):
        # Another rank may be in the next run already, where it cannot meet this one.
        for each in (run, FATAL, run + 1):
            if store.check([_key(each)]):
                return store.get(_key(each)).decode()
    return None


def _key(run: int) -> str:
    return f"{_FIRST}/{run}"


def blame(error: Exception, suspects: Sequence[int] = (), doing: str = "waiting for") -> Exception:
    """Publish ``error``, or find the error of another rank behind it.

    Args:
        error: Error that has arisen here.
        suspects: Ranks whose connection has broken, if it is that.
        doing: What this rank did with them then.

    Returns:
        ``error`` itself if it arose on this rank; a :class:`PeerFailedError` with the error of another rank if this
        rank has only noticed the broken connection.
    """
    if isinstance(error, PeerFailedError) or not dist.is_initialized():
        return error
    if not _is_broken_connection(error):
        publish_own(error)
        return error
    search = BackgroundCall(lambda: _search(suspects, doing))
    return (search.get() or error) if search.within(_ANSWER_SECONDS) else error


def _search(suspects: Sequence[int], doing: str) -> PeerFailedError | None:
    """Wait a moment for the first failure, which may be about to be published, or be the end of a suspect."""
    begun, lost = time.monotonic(), dict[PeerProcess, int | None]()
    with suppress(RuntimeError):  # the process that serves the store ends just now
        while (store := _store_in_reach()) is not None:
            if (culprit := first_failure(store, current_run())) is not None:
                return PeerFailedError(culprit)
            waited = time.monotonic() - begun
            codes = _ended(store, suspects)
            for process, code in codes.items():
                if code is not None and code < 0:
                    publish(store, process.rank, how_it_ended(process.pid, code))
            lost = lost if lost or waited > _CAUSE_SECONDS else codes
            if waited > _PATIENCE_SECONDS:
                return _published(store, lost, doing)
            time.sleep(0.02)
    server = "The launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "Rank 0"
    return PeerFailedError(
        f"{server} is gone: it was killed, or has ended. Rank {dist.get_rank()} ends because of that."
    )


def _ended(store: dist.Store, suspects: Sequence[int]) -> dict[PeerProcess, int | None]:
    """Processes of ``suspects`` on this machine that have ended, with exit codes as far as they are known."""
    key = f"{_PROCESSES}/{process_space()}"
    lines = store.get(key).decode().splitlines() if store.check([key]) else []
    processes = [process for process in map(PeerProcess.decode, lines) if process.rank in suspects]
    codes = {process: exit_code_of(process) for process in processes if has_ended(process)}
    return {process: code for process, code in codes.items() if code is None or -code not in _CONSEQUENCES}


def _published(store: dist.Store, lost: Mapping[PeerProcess, int | None], doing: str) -> PeerFailedError | None:
    """Publish that processes ``lost``, with exit codes as far as known, have ended; ``None``: there are none."""
    if not lost:
        return None
    process, code = next(iter(lost.items()))
    gone = f"its process ({process.pid}) has ended without a word, as one does that is killed. {_where_to_read()}"
    story = gone if code is None else how_it_ended(process.pid, code)
    if code == 0:
        story = f"its process ({process.pid}) has ended with exit code 0, while rank {dist.get_rank()} was {doing} it."
    publish(store, process.rank, story)
    return PeerFailedError(first_failure(store, current_run()) or f"rank {process.rank} failed first: {story}")


def raise_lost(error: RuntimeError, ranks: int | Sequence[int], doing: str) -> NoReturn:
    """Raise the error of the rank that failed, after a connection to another rank has failed with ``error``.

    A function and no context manager, because every message passes through several such places.

    Args:
        error: Error that was caught; one of this package's own is raised as it is.
        ranks: Global rank of the other rank, or of all ranks that it may be.
        doing: Activity, for the message: "sending a tensor to".
    """
    if isinstance(error, SMPError):
        raise error
    ranks = [ranks] if isinstance(ranks, int) else ranks
    cause = blame(error, ranks, doing)
    if cause is not error:
        raise cause from error
    several = len(ranks) > 1
    who = f"{'ranks' if several else 'rank'} {', '.join(map(str, ranks))}"
    raise PeerFailedError(
        f"While {doing} {who}, the connection failed: {error}\n"
        f"{'One of them' if several else who.capitalize()} is stuck, or has ended without a word, as a process does "
        f"that is killed: by the system when memory runs out, for example. {_where_to_read()}"
    ) from error


def _where_to_read() -> str:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return (
            "The table with which `torchrun` or `accelerate launch` ends names the signal, under 'Root Cause': SIGKILL "
            "if memory has run out, SIGBUS if a file was made shorter while it was read or `/dev/shm` is full."
        )
    return "Its own output, or that of its launcher, may say more."


def is_library(names: Mapping[str, Any]) -> bool:
    """Whether code with the globals ``names`` belongs to a library that user code calls."""
    return str(names.get("__name__", "")).split(".")[0] in _LIBRARIES


def _summary(error: BaseException) -> str:
    """Message of ``error`` (first and last line if it is long), and its place in the user's code."""
    lines = [
        line
        for line in "".join(traceback.format_exception_only(error)).strip().splitlines()
        if not line.startswith(MORE)  # this rank prints it
    ]
    ends = [lines[0], lines[-1]] if len(lines) > _NUM_LINES else lines
    said = (" ... " if len(lines) > _NUM_LINES else "\n").join(map(shortened, ends))
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if not is_library(frame.f_globals)] or frames
    if not own:
        return said
    frame, line = own[-1]
    return f"{said} ({frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"


def shortened(line: str) -> str:
    """``line`` of a message, without its middle if it is very long."""
    half = _NUM_LETTERS // 2
    return line if len(line) <= _NUM_LETTERS else f"{line[:half]} ... {line[-half:]}"


def _store_in_reach() -> dist.Store | None:
    """Store of the process group; ``None``: there is none, or its server is gone."""
    if not dist.is_initialized():
        return None
    default = inner = default_store()
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.TCPStore):
        # The launcher serves it: it may accept a connection in the middle of its exit, but will not answer.
        if inner.host in _THIS_MACHINE and is_exiting(os.getppid()):
            return None
        try:
            socket.create_connection((inner.host, inner.port), timeout=_CONNECT_SECONDS).close()
        except TimeoutError:  # it may be busy
            return default
        except OSError:
            return None
    return default


def _is_broken_connection(error: Exception) -> bool:
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    # gloo raises bare RuntimeErrors
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _BROKEN_CONNECTION)
