"""Write the trace that a picture shows, ``docs/pictures/measured.json``::

    PYTHONPATH=docs:examples python examples/train.py trainer.max_steps=60 \\
        '+callbacks.trace={_target_: measured_step.SavesTrace, path: docs/pictures/measured.json}'

The example's GPT on two stages. The trace of the fastest step is kept: other programs disturb it least.
"""

from pathlib import Path

import lightning as L

__all__ = ["SavesTrace"]

# The first steps plan and warm up.
FIRST = 8


class SavesTrace(L.Callback):
    """Saves the timeline of the fastest step.

    Args:
        path: File to write; relative to the folder in which the run was started.
    """

    def __init__(self, path: str) -> None:
        self._path, self._fastest = Path(path).absolute(), float("inf")

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Save it; all ranks of the replica take part."""
        if trainer.global_step >= FIRST:
            timeline = trainer.strategy.timeline()  # type: ignore[attr-defined]
            if timeline.comparison.seconds < self._fastest:
                self._fastest = timeline.comparison.seconds
                timeline.save(self._path)
