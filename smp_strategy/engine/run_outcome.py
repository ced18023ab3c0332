"""Outcome of a run: an error that has ended a step, a backward or an update decides how the next run begins.

After an error in a step or in its backward the weights are those before it, but its collectives and gradients are
unfinished. So the next run that trains begins with a full module, which is sharded again.

After an error in an update on some ranks only, no run may go on with the module (``broken_updates.py``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.engine.broken_updates import refuse_mixture

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
        refuse_mixture([is_broken for _, is_broken in everyones])
