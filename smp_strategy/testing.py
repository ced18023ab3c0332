"""Run a function on N forked local gloo ranks, and find a free port for ranks to meet at.

A distributed test must be cheap, must not hang, and must show the first failure. So ranks are forked (0.1 s instead of
several seconds for fresh interpreters), each rank has a deadline after which it prints its stack, and the error of the
rank that failed first is raised in the caller. A finished rank lingers, because ending its process would discard data
that others have not received yet. A failed rank ends at once, so that the others notice.

Forking is only safe while the parent runs one OpenMP thread: call ``torch.set_num_threads(1)`` before anything
computes (``tests/conftest.py`` does).
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist

from smp_strategy.distributed.malloc import keep_freed_memory
from smp_strategy.distributed.torch_private import default_group
from smp_strategy.planning.garbage import collecting_paused

__all__ = ["collecting_paused", "free_port", "run_ranks"]

# Ephemeral ports are above: Linux from 32768 on, others from 49152 (IANA, RFC 6335).
_LOWEST, _HIGHEST = 20000, 32767


def free_port() -> int:
    """Return a free port outside of the system's ephemeral range.

    Binding to port 0 would return a port of that range. Until the ranks listen on it, seconds later, any outgoing
    connection of another process may have been given the same one; here only an explicit bind can take it.
    """
    while True:
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # taken
                continue
            return port


# After one rank fails, the others get this long to end by themselves, so that their errors can be compared.
GRACE_SECONDS = 5.0
# A finished rank lingers this long, so that others can receive its data; those that wait for more learn then
# that it has ended.
LINGER_SECONDS = 4.0
_DONE = b"all ranks are done"


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` forked ranks and return their results by rank.

    The default process group (gloo) exists while ``fn`` runs, and the environment is that of ``torchrun``.

    Args:
        fn: function of every rank; its result is pickled.
        world_size: number of ranks.
        timeout: seconds after which all ranks are stopped, each with its stack on stderr.

    Raises:
        RuntimeError: a rank failed (with the traceback of the first one) or the deadline passed.
    """
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f"run_ranks forks, which hangs after torch has computed with several threads, but torch runs "
            f"{torch.get_num_threads()}. Call torch.set_num_threads(1) first."
        )
    # Dry runs need it and it takes a second to import: import it once here, not in every rank.
    importlib.import_module("torch._dynamo")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes, connections = [], []
        for rank in range(world_size):
            # Create and close pipe ends one by one: no other rank inherits this end, so it closes when the rank ends.
            ours, theirs = context.Pipe()
            arguments = (fn, args, rank, world_size, port, folder, timeout, theirs)
            processes.append(context.Process(target=_rank_main, args=arguments))
            connections.append(ours)
            # The child freezes what it has inherited, and collects garbage from then on. A collection before that
            # would end garbage of the parent, perhaps with threads that the child does not have.
            with collecting_paused():
                processes[-1].start()
            theirs.close()
        try:
            return _collect(connections, timeout)
        finally:
            for connection in connections:
                with contextlib.suppress(OSError):  # it has ended
                    connection.send_bytes(_DONE)
            for process in processes:
                process.join(timeout=GRACE_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(receivers: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    deadline = time.monotonic() + timeout
    waiting = dict(zip(receivers, range(len(receivers)), strict=True))
    while waiting and time.monotonic() < deadline:
        remaining = max(deadline - time.monotonic(), 0)
        for receiver in cast(list[Connection], wait(list(waiting), timeout=remaining)):
            rank = waiting.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                succeeded, value = False, "the process ended without a result (killed?)"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise RuntimeError("a rank failed\n" + "\n".join(failures))
    if waiting:
        ranks = sorted(waiting.values())
        raise RuntimeError(f"ranks {ranks} did not finish within {timeout} s; their stacks are on stderr")
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout: float,
    connection: Connection,
) -> None:
    # Freeze objects of the parent: a garbage collection would touch all of them, and so copy every shared page.
    gc.freeze()
    gc.enable()
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    keep_freed_memory()
    # PyTorch replaces the inherited thread pool at its first use; threads of autograd that do so at once may find none.
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        # A rank that ended at once would break connections that others are still making.
        default_group().barrier().wait()
        result = (True, fn(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would pass tensors as handles into a process that is about to end.
    connection.send_bytes(pickle.dumps(result))
    faulthandler.cancel_dump_traceback_later()
    if result[0]:
        connection.poll(LINGER_SECONDS)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: a forked child shares atexit handlers and threads' state with pytest.
    os._exit(0)
