"""Write the trace that a picture shows, ``docs/pictures/measured.json``::

    PYTHONPATH=docs:examples python examples/train.py smp.trace_execution_times=true trainer.max_steps=12 \\
        '+callbacks.trace={_target_: measured_step.SavesTrace, path: docs/pictures/measured.json, steps: [8, 9, 10, 11]}'

The example's GPT on two stages. Of the steps the trace of the fastest is kept: other programs disturb it least.
"""

from collections.abc import Sequence
from pathlib import Path

import lightning as L

__all__ = ["SavesTrace"]


class SavesTrace(L.Callback):
    """Saves the timeline of the fastest of some steps.

    Args:
        path: File to write; relative to the folder in which the run was started.
        steps: Steps that are compared.
    """

    def __init__(self, path: str, steps: Sequence[int]) -> None:
        self._path, self._steps, self._fastest = Path(path).absolute(), set(steps), float("inf")

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Save it; all ranks of the replica take part."""
        if trainer.global_step in self._steps:
            timeline = trainer.strategy.timeline()  # type: ignore[attr-defined]
            if timeline.comparison.seconds < self._fastest:
                self._fastest = timeline.comparison.seconds
                timeline.save(self._path)
