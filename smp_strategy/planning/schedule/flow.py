"""Segment graph of a microbatch: the input of the schedulers.

The routing rule (:mod:`smp_strategy.pipeline.routing`), applied to a trace under an assignment of units to stages,
gives the segments of each stage, their work, and the messages between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.routing import Router, SegmentId, gradient_uses

__all__ = ["Flow", "KeptBytes", "route"]


class KeptBytes(NamedTuple):
    """Activation bytes of a call."""

    name: str
    """Name of the unit; empty for a glue operation."""
    saved: int
    """Bytes on the device until the end of its backward."""
    again: int = 0
    """Recomputed bytes, on the device during its backward."""
    offloaded: int = 0
    """Bytes in host memory, loaded ahead of its backward."""
    position: int = -1
    """Position of the event in the microbatch."""
    working: int = 0
    """Bytes beside these while the call runs, forward or backward."""


@final
@dataclass(frozen=True)
class Flow:
    """Segments of one microbatch on all stages, with their dependencies."""

    num_stages: int
    work: Mapping[SegmentId, Work]
    """Segments in program order, with the work of their events."""
    forward_needs: Mapping[SegmentId, Mapping[SegmentId, int]]
    """Segments whose forward must come before, with the bytes sent from there; includes earlier segments of the same
    stage."""
    backward_needs: Mapping[SegmentId, Mapping[SegmentId, int]]
    """For segments with a backward: the segments whose backward must come before, with the bytes of gradients sent
    from there."""
    kept: Mapping[SegmentId, Sequence[KeptBytes]]
    """Activations of the calls of each segment, in program order."""
    cut_bytes: Mapping[tuple[int, int], int]
    """Forward bytes from stage to stage, per microbatch."""

    def at_speeds(self, speeds: Sequence[float]) -> "Flow":
        """Graph on stages of these relative speeds; empty: all equal."""
        if not speeds:
            return self
        return replace(
            self, work={segment: work.scaled(1 / speeds[segment.stage]) for segment, work in self.work.items()}
        )


def route(trace: Trace, stage_of: Mapping[str, int], num_stages: int, work: Mapping[int, Work]) -> Flow:
    """Segment graph of a traced microbatch under an assignment of units to stages.

    Args:
        trace: Events of one microbatch.
        stage_of: Stage of each unit, by qualified name.
        num_stages: Number of pipeline stages.
        work: Work of each event, by its position in the trace; zero for missing ones.
    """
    router = Router(stage_of, num_stages)
    placed = [(event, router.place(event)) for event in trace.events]
    wanted, uses = gradient_uses(placed, trace.loss)

    sums: dict[SegmentId, Work] = {}
    forward_needs: dict[SegmentId, dict[SegmentId, int]] = {}
    kept: dict[SegmentId, list[KeptBytes]] = {}
    made_in: dict[int, SegmentId] = {}
    received_in: dict[tuple[int, int], SegmentId] = {}
    cut_bytes: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}
    for position, (event, placement) in enumerate(placed):
        sizes.update((value.id, value.nbytes) for value in event.outputs)
        if event.kind == "given":
            continue
        for segment in (*(move.source for move in placement.moves), *placement.segments):
            if segment not in sums:
                sums[segment], kept[segment] = Work(), []
                forward_needs[segment] = {SegmentId(segment.stage, number): 0 for number in range(segment.number)}
        for move in placement.moves:
            needs = forward_needs[move.target]
            needs[move.source] = needs.get(move.source, 0) + move.value.nbytes
            received_in[move.value.id, move.target.stage] = move.target
            link = (move.source.stage, move.target.stage)
            cut_bytes[link] = cut_bytes.get(link, 0) + move.value.nbytes
        if event.kind != "read":
            (segment,) = placement.segments
            sums[segment] = sums[segment].plus(work.get(position, Work()))
            kept[segment].append(
                KeptBytes(
                    event.name if event.kind == "unit" else "",
                    event.saved_bytes,
                    event.again_bytes,
                    event.offloaded_bytes,
                    position,
                    event.kept.working_bytes,
                )
            )
            made_in.update((value.id, segment) for value in event.outputs)

    backward_needs = {made_in[value]: dict[SegmentId, int]() for value in wanted if value in made_in}
    _add_backward_needs(backward_needs, uses, made_in, received_in, sizes)
    return Flow(
        num_stages,
        sums,
        forward_needs,
        {segment: backward_needs[segment] for segment in sums if segment in backward_needs},
        kept,
        cut_bytes,
    )


def _add_backward_needs(
    backward_needs: dict[SegmentId, dict[SegmentId, int]],
    uses: Iterable[tuple[int, SegmentId]],
    made_in: Mapping[int, SegmentId],
    received_in: Mapping[tuple[int, int], SegmentId],
    sizes: Mapping[int, int],
) -> None:
    """Add the way of gradients: from the segment that used a value to the one in which this stage received it, and from
    there to the segment that made it."""
    sent: set[tuple[int, SegmentId]] = set()
    for value, user in uses:
        way = [user, received_in.get((value, user.stage)), made_in.get(value)]
        stops = [stop for stop in way if stop is not None]
        for before, after in zip(stops, stops[1:], strict=False):
            if before != after:
                needs = backward_needs.setdefault(after, {})
                # Several uses on a stage send one gradient.
                travels = before.stage != after.stage and (value, before) not in sent
                needs[before] = needs.get(before, 0) + (sizes[value] if travels else 0)
                sent.add((value, before))
        backward_needs.setdefault(user, {})
