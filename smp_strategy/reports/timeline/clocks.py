"""Clock synchronization of recordings (Cristian's algorithm), and the timeline gathered from all stages.

Every rank records times by its own clock. Ranks of one host share a clock; clocks of different hosts have different
zeros. So stage 0 asks every other stage for its time, several times. The answer was given between the departure of the
question and its own arrival; the middle is the best estimate. The quickest exchange is used, and its error is at most
half of its duration. If the answer fits the clock of stage 0, both are the same clock.

Clocks of hosts also drift, by some microseconds per second: gather soon after the step.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from time import perf_counter
from typing import NamedTuple

import torch

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.message_tags import CLOCKS
from smp_strategy.errors import SMPError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.recording import Recorded, Recording
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["Exchange", "aligned", "gather", "offset_of", "offsets"]

EXCHANGES = 16


class Exchange(NamedTuple):
    """Question for the time of another clock, with its answer."""

    asked: float
    """Departure of the question, by the asking clock."""
    answer: float
    """Time of the other clock."""
    heard: float
    """Arrival of the answer, by the asking clock."""


def offset_of(exchanges: Sequence[Exchange]) -> float:
    """Time of the other clock when the asking clock is at 0."""
    best = min(exchanges, key=lambda each: each.heard - each.asked)
    if best.asked <= best.answer <= best.heard:
        return 0.0
    return best.answer - (best.asked + best.heard) / 2


def offsets(
    transport: Transport, stage: int, num_stages: int, clock: Callable[[], float] = perf_counter
) -> list[float] | None:
    """Offset of each stage's clock to that of stage 0; collective.

    Returns:
        The offsets on stage 0, ``None`` on the others.
    """
    spec = TensorSpec.of(torch.zeros(1, dtype=torch.float64, device="cpu"))

    def tell(other: int) -> None:
        transport.send(torch.tensor([clock()], dtype=torch.float64, device="cpu"), spec, other, CLOCKS)

    def hear(other: int) -> float:
        return transport.receive(spec, other, CLOCKS).wait().item()

    def ask(other: int) -> Exchange:
        asked = clock()
        tell(other)
        return Exchange(asked, hear(other), clock())

    found = None
    if stage == 0:
        others = range(1, num_stages)
        found = [0.0, *(offset_of([ask(other) for _ in range(EXCHANGES)]) for other in others)]
    else:
        for _ in range(EXCHANGES):
            hear(0)
            tell(0)
    transport.flush()
    return found


def aligned(recordings: Sequence[Recording], offsets: Sequence[float]) -> tuple[Recording, ...]:
    """Recordings on one clock, with 0 when the first stage began to work.

    Another stage may have entered the step earlier and waited; this wait is cut off.
    """
    by_one_clock = [recording.since(offset) for recording, offset in zip(recordings, offsets, strict=True)]
    zero = min(span.start + span.waited for recording in by_one_clock for span in recording.spans[:1])
    return tuple(_from_zero(recording.since(zero)) for recording in by_one_clock)


def _from_zero(recording: Recording) -> Recording:
    if not recording.spans or recording.spans[0].start >= 0:
        return recording
    first, *others = recording.spans
    first = first._replace(start=0.0, waited=first.waited + first.start)
    return replace(recording, spans=(first, *others))


def gather(recorded: Recorded | None, mesh: ProcessMesh, timeout: timedelta | None = None) -> Timeline:
    """Timeline of a step; collective over the replica.

    Args:
        recorded: Recording of the step on this rank.
        mesh: Mesh of the ranks.
        timeout: Longest wait for another rank; ``None``: timeout of the backend.

    Raises:
        SMPError: no step was recorded.
    """
    if recorded is None:
        raise SMPError(
            "There is no timeline yet: no training step has run after a timetable. The second one does, and the first "
            "if no validation comes before it and `skip_tracing` is off; under manual optimization none does. Ask "
            "after it."
        )
    known: Sequence[float] = [0.0]
    recordings: Sequence[Recording] = [recorded.recording]
    if mesh.pp > 1:
        # Separate connections: those of the steps end with the run, and a timeline may be asked for after it.
        with closing(Transport(mesh.stage_ranks, mesh.pp_group, timeout)) as transport:
            found = offsets(transport, mesh.stage, mesh.pp)
        mine = mesh.stage, recorded.recording, found
        told = collectives.gather_objects(mine, "a call of `timeline()`", mesh.pp_group)
        _, recordings, (known, *_) = zip(*sorted(told, key=lambda each: each[0]), strict=True)
    return Timeline(
        plan=recorded.plan,
        stages=aligned(recordings, known),
        ranks=mesh.stage_ranks,
        step=recorded.number,
        rank=mesh.rank,
    )
