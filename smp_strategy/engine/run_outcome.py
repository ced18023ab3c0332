"""Outcome of a run: an error that has ended a step, a backward or an update decides how the next run begins.

After an error in a step or in its backward the weights are those before it, but its collectives and gradients are
unfinished. So the next run that trains begins with a full module, which is sharded again.

An update changes weights on each rank by itself. If an error ends it on all ranks, each parameter has the value that
its owners have given it, as in a single process. If it ends the update on some ranks only, the shards of the module are
of different steps, and no run may go on with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import SMPError

__all__ = ["RunOutcome"]


@final
class RunOutcome:
    """Errors that have ended actions of this rank.

    Attributes:
        has_failed: Whether an error has ended the last step, its backward or an update.
        has_broken_update: Whether an error has ended an update of this rank's share.
    """

    def __init__(self) -> None:
        self.has_failed = self.has_broken_update = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of a step, or of its backward."""
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise
        self.has_failed = False

    def end(self, *, failed: bool, has_broken_update: bool) -> None:
        """Note the errors that are known at the end of the run."""
        self.has_failed = self.has_failed or failed or has_broken_update
        self.has_broken_update = self.has_broken_update or has_broken_update

    def agree(self) -> None:
        """Note the errors of all ranks. Collective.

        Raises:
            SMPError: an error has ended the update of some ranks, and the others have updated their shares.
        """
        everyones = collectives.gather_objects((self.has_failed, self.has_broken_update), "the end of the last run")
        self.has_failed = any(failed for failed, _ in everyones)
        broken = [rank for rank, (_, is_broken) in enumerate(everyones) if is_broken]
        if 0 < len(broken) < len(everyones):
            raise SMPError(
                f"An error has ended the last optimizer step on ranks {broken} of {len(everyones)}, and the others "
                "have updated their shares of the module: it is a mixture of two steps. Make the module again, and "
                "load a checkpoint into it."
            )
