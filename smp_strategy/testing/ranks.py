"""Run a function on N local gloo ranks.

A distributed test must be cheap, must not hang, and must show the first failure. So ranks are forked (0.1 s instead
of several seconds for fresh interpreters), each rank runs under a deadline after which every rank prints its stack,
and the error of the rank that failed first is raised in the caller.

Forking is only safe while the parent runs one OpenMP thread: call ``torch.set_num_threads(1)`` before anything
computes (``tests/conftest.py`` does).
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
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

__all__ = ["run_ranks"]

# After one rank fails, the others get this long to end by themselves, so that their errors can be compared.
GRACE_SECONDS = 5.0


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` forked ranks and return their results by rank.

    The default process group (gloo) exists while ``fn`` runs, and the environment is that of ``torchrun``.

    Args:
        fn: what every rank runs; its result is pickled.
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
    # Dry runs need it and it takes a second to import: once here, and not once in every rank.
    importlib.import_module("torch._dynamo")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_rank_main, args=(fn, args, rank, world_size, port, folder, timeout, pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], timeout)
        finally:
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
    sender: Any,
) -> None:
    # What comes from the parent stays: a collection would look at all of it, and so copy every page that is shared.
    gc.freeze()
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        result = (True, fn(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would pass tensors as handles into a process that is about to end.
    sender.send_bytes(pickle.dumps(result))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: a forked child shares atexit handlers and threads' state with pytest.
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
