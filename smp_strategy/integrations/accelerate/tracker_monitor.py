"""``SMPMonitor`` for Accelerate's trackers and for Hugging Face's Trainer: the figures of a run, and NaN and infinity.

The engine counts (:mod:`smp_strategy.engine.figures.step_monitor`). A script asks for the figures when it logs, the
Trainer gets them into what it logs (:meth:`smp_strategy.integrations.accelerate.hf_trainer.SMPTrainer.log`).
"""

import functools
import warnings
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import new_class
from typing import Any, Self

from smp_strategy.engine.figures.nonfinite import NonfinitePolicy
from smp_strategy.engine.figures.step_monitor import StepMonitor
from smp_strategy.errors import SMPError

__all__ = ["TrackerMonitor", "make_tracker_monitor"]


class TrackerMonitor:
    """Measure speed, memory and waiting of a run, and find NaN and infinity.

    Example::

        monitor = SMPMonitor().attach(accelerator)  # after `prepare`
        accelerator.log(monitor.figures(), step=step)  # on all processes
        Trainer(..., callbacks=[SMPMonitor()])  # Hugging Face's

    Args:
        nonfinite: when gradients are NaN or infinite: ``raise`` an error that names unit, stage and microbatch,
            ``skip`` the update with a warning, or ``ignore`` it, which costs nothing.
        trace_steps: numbers of training steps, from 1, whose timeline is saved.
        trace_folder: folder for ``step-<number>.json``, for https://ui.perfetto.dev; default: the ``output_dir`` of
            Hugging Face's Trainer, or the ``project_dir`` of the Accelerator.
    """

    def __init__(
        self,
        nonfinite: NonfinitePolicy = "raise",
        trace_steps: Collection[int] = (),
        trace_folder: str | Path | None = None,
    ) -> None:
        self.monitor = StepMonitor(nonfinite, trace_steps, tell=lambda text: warnings.warn(text, stacklevel=2))
        self.trace_folder = trace_folder
        self._session: Any = None

    def attach(self, accelerator: Any) -> Self:
        """Measure the model that ``accelerator`` has prepared.

        Raises:
            SMPError: the Accelerator has none of this library, or has not prepared a model.
        """
        session = getattr(accelerator, "smp", None)
        if session is None:
            raise SMPError("SMPMonitor measures runs of smp_strategy only, and this Accelerator has no SMPPlugin.")
        session.engine.inspection.monitor = self.monitor
        self.monitor.trace_folder = Path(self.trace_folder or getattr(accelerator, "project_dir", None) or "")
        self._session = session
        return self

    def figures(self) -> dict[str, float]:
        """Figures since the last call, by name; the same on all processes. Collective."""
        if self._session is None:
            raise SMPError("SMPMonitor measures nothing yet: call `monitor.attach(accelerator)` after `prepare`.")
        found: dict[str, float] = self._session.figures()
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Begin to measure a run of Hugging Face's Trainer, whose optimizer is prepared."""
        if hasattr(optimizer, "smp"):
            self.attach(optimizer)
            self.monitor.trace_folder = Path(self.trace_folder or args.output_dir)
        else:
            warnings.warn("SMPMonitor measures runs of smp_strategy only; this Trainer has no SMPPlugin.", stacklevel=2)


@functools.cache
def make_tracker_monitor() -> type[TrackerMonitor]:
    """The class ``SMPMonitor``; a callback of Transformers, if that is installed."""
    bases: tuple[type, ...] = (TrackerMonitor,)
    if find_spec("transformers") is not None:
        bases += (import_module("transformers").TrainerCallback,)
    body = {"__module__": "smp_strategy.integrations.accelerate", "__doc__": TrackerMonitor.__doc__}
    return new_class("SMPMonitor", bases, exec_body=lambda names: names.update(body))
