"""Run a step for a second time, as if for the first: the state of the module before it, and the number of the step.

A caller may learn only after a step that it should have run another way. Nothing has been updated until then, so the
same batch gives the same results again if the step finds what it found: buffers, attributes and variables of its code,
and its random streams, which are derived from the number of the step.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import final

import torch

from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.model.ownership import home_of
from smp_strategy.model.trace.places import variables_of
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.pipeline.job import Step

__all__ = ["StateBefore"]


@final
class StateBefore:
    """State of the module at the time of construction, which a step may change."""

    def __init__(self, parts: EngineParts, step: Step) -> None:
        self._parts = parts
        self._step = step
        self._number = parts.num_steps
        modules = list(parts.layout.module.modules())
        # Buffers of other stages cannot change here.
        present = [each for part in modules for each in part._buffers.values() if each is not None]
        self._buffers = [(buffer, buffer.clone()) for buffer in present if home_of(buffer) is None]
        self._attributes = Snapshot(
            modules=modules, objects=[held for part in modules for held in vars(part).values()], tensors_of=modules
        )
        self._variables = variables_of(modules, step).snapshot()

    def restore(self) -> None:
        """Give the module this state."""
        self._parts.num_steps = self._number
        self._attributes.restore()
        self._variables.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the module has this state; afterwards it has that of now. Nothing is printed in it."""
        now = StateBefore(self._parts, self._step)
        self.restore()
        try:
            with redirect_stdout(io.StringIO()):
                yield
        finally:
            now.restore()
