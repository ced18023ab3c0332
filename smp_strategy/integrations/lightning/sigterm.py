"""Preemption: SIGTERM stops all ranks before the same step.

Lightning broadcasts from rank 0 at the beginning of each batch whether to stop, and all ranks wait for it.
Here rank 0 is the last stage: no other rank would begin a step before it has ended the previous one, so steps of a
pipeline could not overlap. Besides, a rank that gets the signal itself would stop alone.

So a flag for the signal travels with the comparison that ranks begin before each step, in the background
(:mod:`smp_strategy.distributed.agreement.ledger`). They read the result one step later, when it is complete: all stop
before the same step, whichever rank got the signal. When training ends they wait for the result, which nothing would
read later. Evaluation stops, too, unless replicas share it, because they may differ in their number of batches: then it
runs to its end, and so does prediction, as in a single process.

Lightning then ends the script with exit code 0. A scheduler takes that for a completed run, and does not requeue it. So
without a terminal, or under SLURM, the exit code is 143, as of any process that SIGTERM ends.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, final

import torch.distributed as dist

from smp_strategy.engine.engine import Engine
from smp_strategy.integrations.lightning.child_processes import STOPPED
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.model.patching import Patches

__all__ = ["StopSignal", "end_as_stopped", "is_at_terminal"]


@final
class StopSignal:
    """Agreement of all ranks on stopping after SIGTERM: it travels with the notes that the engine's ledger compares.

    ``stop`` makes the exception that ends the run.
    """

    def __init__(self, trainer: Any, engine: Engine, stop: Callable[[], BaseException]) -> None:
        self._trainer = trainer
        self._ledger = engine.ledger
        self._stop = stop
        self._has_come = False

    @classmethod
    def of(cls, trainer: Any, engine: Engine, tree: Tree) -> "StopSignal | None":
        """For a run; ``None`` with a single rank, or if this Lightning has no such broadcast to replace."""
        if dist.get_world_size() == 1 or not hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            return None
        return cls(trainer, engine, tree.pytorch("utilities.exceptions").SIGTERMException)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace Lightning's signal handler and its broadcast while this is open."""
        connector, loop = self._trainer._signal_connector, self._trainer.fit_loop.epoch_loop
        with Patches() as patches:
            patches.put(self._ledger, "is_paced", True)
            patches.put(connector, "_sigterm_notifier_fn", self._note)
            patches.put(loop, "_broadcast_sigterm_tensor", self.check)
            yield

    def _note(self, signum: Any, frame: Any) -> None:
        """Handle the signal."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._has_come:
            launcher.kill(signum)  # the ranks that this one has started
        self._has_come = True

    def check(self) -> None:
        """End training if a rank had the signal before the last step. Call it before each step, on all ranks."""
        self._look()
        self._ledger.begin("the next training step", flag=self._has_come)

    def end(self) -> None:
        """End the run if a rank has the signal by now. Call it after training, on all ranks."""
        self.check()
        self._look()

    def _look(self) -> None:
        self._ledger.check()
        if self._ledger.is_flagged:
            self._trainer._signal_connector.received_sigterm = True
            raise self._stop()


def end_as_stopped(exception: BaseException, tree: Tree) -> None:
    """Set the exit code of SIGTERM if that signal has ended training and nobody is at a terminal."""
    if not isinstance(exception, tree.pytorch("utilities.exceptions").SIGTERMException) or exception.code is not None:
        return
    if not is_at_terminal(os.environ, (sys.stdin, sys.stdout, sys.stderr)):
        exception.code = STOPPED
    tree.pytorch("utilities.rank_zero").rank_zero_info(
        f"SIGTERM has ended this run; the exit code is {exception.code or 0}."
    )


def is_at_terminal(environ: Mapping[str, str], streams: Sequence[TextIO | None]) -> bool:
    """Whether this process was probably started by hand; ``streams`` are standard input, output and error."""
    return "SLURM_JOB_ID" not in environ and any(
        stream is not None and not stream.closed and stream.isatty() for stream in streams
    )
