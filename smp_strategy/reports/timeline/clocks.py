"""One clock for the recordings of all stages.

Every rank notes times by its own clock. The ranks of one host share theirs, those of others began to count at another
time, so recordings cannot be laid side by side as they are. Stage 0 therefore asks every other stage for its time, some
times over: the answer was given between the question's departure and the answer's arrival, and best it is taken to have
been given in the middle. The quickest of these exchanges is the one to be trusted, and it is wrong by half of what it
took at most. Where the answer fits the clock of who asks, it is the same clock.

Clocks of hosts also drift, by some microseconds in a second: ask soon after the step.

From what each stage has recorded to the timeline of all stages, on every rank of the replica.
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
from smp_strategy.pipeline.transport import Transport
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["Exchange", "aligned", "gather", "offset_of", "offsets"]

EXCHANGES = 16


class Exchange(NamedTuple):
    """A question for the time, and its answer."""

    asked: float
    """When the question left, by the clock of who asks."""
    answer: float
    """What the other clock showed."""
    heard: float
    """When the answer was there, by the clock of who asks."""


def offset_of(exchanges: Sequence[Exchange]) -> float:
    """What the other clock shows when that of who asks shows nought."""
    best = min(exchanges, key=lambda each: each.heard - each.asked)
    if best.asked <= best.answer <= best.heard:
        return 0.0
    return best.answer - (best.asked + best.heard) / 2


def offsets(
    transport: Transport, stage: int, num_stages: int, clock: Callable[[], float] = perf_counter
) -> list[float] | None:
    """Offset of each stage's clock to that of stage 0, which alone gets to know them; collective.

    Args:
        transport: connects the stages.
        stage: this rank's.
        num_stages: how many there are.
        clock: this rank's.
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
    """The recordings by one clock, which showed nought when the first stage began to work.

    Another may have come to the step earlier and waited; that is no part of the step.
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
    """The timeline of a step; collective over the replica.

    Args:
        recorded: what this rank knows of the step.
        mesh: where the ranks stand.
        timeout: longest wait for another rank; ``None``: that of the backend.

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
        # Connections of their own: those of the steps end with the run, and this may be asked after it.
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
