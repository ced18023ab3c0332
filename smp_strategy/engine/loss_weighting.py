"""When the terms of losses get weights, and the line for the user if some have none.

:mod:`smp_strategy.pipeline.batch_loss.loss_weights` explains the weights. Looking for terms costs a little in each
step, so a kind of step in which there were none is not looked at again, unless it takes another path.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from smp_strategy.pipeline.batch_loss.loss_weights import LossWeights

__all__ = ["LossWeighting", "render_problems"]


@final
class LossWeighting:
    """Decides in which steps terms of the loss get weights."""

    def __init__(self, report: Callable[[str], None], *, is_on: bool) -> None:
        self._report = report
        self._is_on = is_on
        self._current: tuple[str, LossWeights] | None = None
        # Kinds of steps that are not looked at, with the path for which that was found out, once it is known.
        self._without: dict[str, int | None] = {}
        self._begun = set[str]()
        # Kinds of steps of which this stage has found counts to be others than expected.
        self._wrong = set[str]()
        self._has_reported = False

    def begin(self, kind: str, microbatches: Sequence[Any], sizes: Sequence[int]) -> LossWeights | None:
        """Weights of the next step of a kind; ``None``: its losses are weighted by samples."""
        self._current = None
        if not self._is_on or len(sizes) < 2 or kind in self._without:
            return None
        applies = kind not in self._wrong
        tells, is_first = not self._has_reported, kind not in self._begun
        self._begun.add(kind)
        weights = LossWeights(microbatches, sizes, applies=applies, tells=tells, compares=tells and is_first)
        self._current = (kind, weights)
        return weights

    def end(self, kind: str | None = None, path: int | None = None) -> None:
        """After a step: report problems, and decide about the next steps of its kind."""
        if self._current is not None:
            current, weights = self._current
            self._current = None
            if weights.problems and not self._has_reported:
                self._has_reported = True
                self._report(render_problems(weights.problems))
            if weights.is_wrong:
                self._wrong.add(current)
            if not weights.has_terms:
                self._without[current] = None
            weights.close()
        if kind in self._without and path is not None:
            known = self._without[kind]
            if known is None:
                self._without[kind] = path
            elif known != path:
                del self._without[kind]


def render_problems(problems: Sequence[str] | dict[str, None]) -> str:
    """The line on terms without weights."""
    named = list(problems)
    more = f"; and {len(named) - 1} more" if len(named) > 1 else ""
    return (
        f"The loss of the batch is the mean of its microbatches' losses, weighted by samples, where a mean is over "
        f"numbers of elements that differ between them and are not known beforehand: {named[0]}{more}. For the loss of "
        "the whole batch compute these numbers from tensors of the batch, or set `microbatches=1`."
    )
