"""Recorder of the start and end of every action, in every step, at a microsecond per action.

Times are those of the host. On an accelerator, which works through a queue, an action ends here when the host has
queued its last kernel.

A profiler shows the actions by name. Its ranges cost a hundred microseconds with cold caches, and delay messages that
other stages wait for, so they are entered only while a profiler runs.
"""

from collections.abc import Callable
from time import perf_counter
from typing import final

from torch.profiler import record_function

from smp_strategy.activations.policy import OffloadStats
from smp_strategy.distributed.torch_private import is_profiling
from smp_strategy.pipeline.recording import Recording, Span
from smp_strategy.pipeline.schedule import Action
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["Recorder"]


@final
class Recorder:
    """Records one step; the transport, if there are several stages, counts the seconds that this one has waited."""

    def __init__(self, transport: Transport | None) -> None:
        self._transport = transport
        self._spans: list[Span] = []

    def note(self, action: Action, do: Callable[[Action], None]) -> None:
        """Carry out ``action`` and note its times."""
        waited, start = self._seconds_waited(), perf_counter()
        # As torch itself asks before it spends time on ranges.
        if is_profiling():
            with record_function(str(action)):
                do(action)
        else:
            do(action)
        end = perf_counter()
        self._spans.append(Span(action, start, end, self._seconds_waited() - waited))

    def recording(self, *, left_plan: bool, traffic: OffloadStats) -> Recording:
        """The recording of the step, which is complete now."""
        return Recording(tuple(self._spans), perf_counter(), left_plan, traffic)

    def _seconds_waited(self) -> float:
        return 0.0 if self._transport is None else self._transport.seconds_waited
