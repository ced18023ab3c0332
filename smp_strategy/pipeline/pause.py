"""A step that waits, while code outside of it goes on.

The microbatches of a step can stop at a barrier (:class:`~smp_strategy.pipeline.microbatch_runner.Barrier`), where
something is done once for the batch. Where that is the caller's business, who is no function that could be called
there, the whole step stays behind with what its programs hold, and is brought to its next barrier when the caller says
so.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from smp_strategy.pipeline.microbatch_runner import MicrobatchRunner

__all__ = ["PausedStep"]


@final
class PausedStep:
    """See the module docstring.

    Args:
        turns: the microbatches.
        running: to be entered while they run.

    Attributes:
        is_over: whether they have ended.
    """

    def __init__(
        self, turns: MicrobatchRunner, running: Callable[[MicrobatchRunner], AbstractContextManager[None]]
    ) -> None:
        self._turns = turns
        self._running = running
        self.is_over = False

    def go_on(self, answer: Any = None) -> Any:
        """Let the microbatches run to their next barrier, where its action is done, or to their end.

        Args:
            answer: what they get from the barrier at which they are.

        Returns:
            What the action returns; ``None`` at the end.
        """
        assert not self.is_over
        try:
            with self._running(self._turns):
                self._turns.answer = answer
                if self._turns.meet():
                    return self._turns.answer
                self.is_over = True
                self._turns.agree()
        except BaseException:
            self.is_over = True
            raise
        self._turns.result()
        return None

    def cancel(self) -> None:
        """Let go of everything; they never go on."""
        if not self.is_over:
            self.is_over = True
            self._turns.cancel()
