"""SIGTERM ends training on all ranks between the same two steps, and no step waits for that.

Lightning lets rank 0 tell all others at the beginning of each batch whether to stop, and they wait for it. Here rank 0
is the last stage: all others would begin no step before that has ended its part of the one before, and steps of a
pipeline could not overlap. Besides, a rank that gets the signal stops by itself.

So ranks compare in the background whether one of them has got the signal, and look at the answer one step later, when
it is there: all stop before the same step, whichever rank has got the signal. When training ends they wait for the
answer, as nobody would look at it later. Evaluation stops as well, unless replicas share it, which may have different
numbers of batches: then it goes on to its end, and so does prediction, as in one process.

Lightning then ends the script with exit code 0. That is fine for somebody at a terminal. A scheduler takes it for a
run that is done, and does not start it again: where there is no terminal, or SLURM has started the script, the exit
code is 143, as that of any process that SIGTERM ends.

Whether ranks that an error has stopped can still save a checkpoint together.

Saving takes all ranks. If an error has stopped one of them, the others wait for it elsewhere, and it would wait for
them for ever. If it has stopped all of them in the same place between two steps (a signal that the Trainer has noticed,
a callback that gives up), nothing of what they have is half done, and they can save. They find that out in the store of
the process group: each tells its place, the last to come says yes, and who has waited too long says no. One answer
counts, that which was first.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.work import Work
from smp_strategy.integrations.lightning.child_processes import STOPPED
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["StopSignal", "end_as_stopped", "have_all_stopped", "is_at_terminal"]


@final
class StopSignal:
    """See the module docstring.

    Args:
        trainer: Lightning's Trainer.
        stop: makes the exception that ends the run.
    """

    def __init__(self, trainer: Any, stop: Callable[[], BaseException]) -> None:
        self._trainer = trainer
        self._stop = stop
        self._has_come = False
        self._pending: tuple[Work[object], torch.Tensor] | None = None

    @classmethod
    def of(cls, trainer: Any, tree: Tree) -> "StopSignal | None":
        """That of a run. ``None``: there is one rank, or this Lightning 2.6 lets no ranks compare: each stops alone."""
        if dist.get_world_size() == 1 or not hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            return None
        return cls(trainer, tree.pytorch("utilities.exceptions").SIGTERMException)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this is open, it is in the place of what Lightning does."""
        connector, loop = self._trainer._signal_connector, self._trainer.fit_loop.epoch_loop
        connector._sigterm_notifier_fn = self._note
        loop._broadcast_sigterm_tensor = self.check
        try:
            yield
        finally:
            del connector._sigterm_notifier_fn, loop._broadcast_sigterm_tensor

    def _note(self, signum: Any, frame: Any) -> None:
        """Handle the signal."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._has_come:
            launcher.kill(signum)  # the ranks that this one has started
        self._has_come = True

    def check(self) -> None:
        """Before each step, on all ranks: end training if a rank had the signal before the last one."""
        self._look()
        self._ask()

    def end(self) -> None:
        """When training has ended, on all ranks: nobody goes on after it if a rank has the signal by now."""
        self.check()
        self._look()

    def _ask(self) -> None:
        flag = torch.tensor(self._has_come, dtype=torch.uint8, device="cpu")
        asked = collectives.reduce_numbers(flag, dist.ReduceOp.MAX, group=None, doing="the next training step")
        self._pending = asked, flag

    def _look(self) -> None:
        if self._pending is None:
            return
        asked, flag = self._pending
        asked.wait()
        self._pending = None
        if flag.item():
            self._trainer._signal_connector.received_sigterm = True
            raise self._stop()


def end_as_stopped(exception: BaseException, tree: Tree) -> None:
    """Let the process end with the exit code of a signal if that is what has ended training."""
    if not isinstance(exception, tree.pytorch("utilities.exceptions").SIGTERMException) or exception.code is not None:
        return
    if not is_at_terminal(os.environ, (sys.stdin, sys.stdout, sys.stderr)):
        exception.code = STOPPED
    tree.pytorch("utilities.rank_zero").rank_zero_info(
        f"SIGTERM has ended this run; the exit code is {exception.code or 0}."
    )


def is_at_terminal(environ: Mapping[str, str], streams: Sequence[TextIO | None]) -> bool:
    """Whether somebody has started this process by hand, as far as can be told.

    Args:
        environ: the environment variables.
        streams: standard input, output and error; ``None`` where there is none.
    """
    return "SLURM_JOB_ID" not in environ and any(
        stream is not None and not stream.closed and stream.isatty() for stream in streams
    )


_KEY: Final = "smp_strategy/stopped"
PATIENCE_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
_YES, _NO = "yes", "no"


def have_all_stopped(place: str | None) -> bool:
    """Whether all ranks ask this, of the same place; the answer is the same on all that do.

    Args:
        place: where this rank has stopped; ``None``: in the middle of something.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return place is not None
    store = dist.distributed_c10d._get_default_store()
    key = f"{_KEY}/{store.add(f'{_KEY}/count/{dist.get_rank()}', 1)}"
    deadline = time.monotonic() + PATIENCE_SECONDS
    if place is not None and store.add(f"{key}/at/{place}", 1) == dist.get_world_size():
        answer = _answered(store, key, _YES)
    elif place is None:
        answer = _answered(store, key, _NO)
    else:
        while not store.check([f"{key}/answer"]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        answer = _answered(store, key, _NO)
    return answer == _YES


def _answered(store: dist.Store, key: str, answer: str) -> str:
    return store.compare_set(f"{key}/answer", "", answer).decode()
