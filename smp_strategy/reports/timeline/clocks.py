"""One clock for the recordings of all stages.

Every rank notes times by its own clock. The ranks of one host share theirs, those of others began to count at another
time, so recordings cannot be laid side by side as they are. Stage 0 therefore asks every other stage for its time, some
times over: the answer was given between the question's departure and the answer's arrival, and best it is taken to have
been given in the middle. The quickest of these exchanges is the one to be trusted, and it is wrong by half of what it
took at most. Where the answer fits the clock of who asks, it is the same clock.

Clocks of hosts also drift, by some microseconds in a second: ask soon after the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch

from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.transport import Transport

__all__ = ["Exchange", "aligned", "offset_of", "offsets"]

EXCHANGES = 16
# Neither steps nor hooks number their messages so high.
TAG = (1 << 31) - 1


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
        transport.send(torch.tensor([clock()], dtype=torch.float64, device="cpu"), spec, other, TAG)

    def hear(other: int) -> float:
        return transport.receive(spec, other, TAG).wait().item()

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
