"""Peak activation memory of each stage under a schedule, with recomputation and offload.

A segment keeps its activations from its forward to the end of its backward, with three refinements:

* Recomputed activations come back unit by unit during backward, beside the activations that the units before keep. If
  weight gradients are postponed, the activations of other units stay until they are computed.
* Offloaded activations are on the device near their use: from *horizon* actions before their backward on, and for some
  calls after their forward, while they are copied away. A single stage counts calls of units instead of actions.
* Only moments that no other moment covers matter: a moment covers another if it is at least as full, whatever units
  keep.

Limits leave room for all gradients at every moment, because batches may be accumulated. In a step by itself the
gradients of a segment exist from its first backward on (:func:`fullest_moments`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.flow import Flow, KeptBytes

__all__ = ["DEFAULT_HORIZON", "ActionMemory", "fullest_moments", "moments", "peak_saved_bytes", "used_bytes"]

DEFAULT_HORIZON = 4
# Calls with pending or queued copies to the host while the next call computes.
LEAVING_CALLS = 3


class Running(NamedTuple):
    """Segment that a stage runs during an action."""

    segment: SegmentId
    recomputes: bool
    """Whether it runs backward through its calls and recomputes dropped activations."""
    frees: bool
    """Whether calls free their activations once backward has passed them."""
    window: int
    """Number of consecutive calls whose offloaded tensors are on the device."""


@final
@dataclass(frozen=True)
class ActionMemory:
    """Activations on a stage during one action, as numbers of microbatches per segment."""

    kept: Mapping[SegmentId, int] = field(default_factory=dict)
    """Microbatches whose activations for the device are there, without those of ``running``."""
    near: Mapping[SegmentId, int] = field(default_factory=dict)
    """Microbatches whose offloaded activations are there."""
    running: Running | None = None

    def covers(self, other: "ActionMemory") -> bool:
        """Whether this moment is at least as full as ``other``, for any sizes of activations."""
        mine, theirs = self.running, other.running
        is_alike = theirs is None or (mine is not None and mine.segment == theirs.segment)
        if theirs is not None and is_alike:
            assert mine is not None
            is_alike = mine.recomputes >= theirs.recomputes and mine.window >= theirs.window
            is_alike = is_alike and mine.frees <= theirs.frees
        return is_alike and _at_least(self._with_running(), other._with_running()) and _at_least(self.near, other.near)

    def _with_running(self) -> Mapping[SegmentId, int]:
        running = self.running
        return self.kept if running is None or not running.frees else _plus(self.kept, running.segment)


def moments(plan: Plan, flow: Flow, horizon: int = DEFAULT_HORIZON) -> tuple[tuple[ActionMemory, ...], ...]:
    """Moments of each stage that no other moment covers.

    Args:
        plan: Order of the actions.
        flow: Segments of one microbatch.
        horizon: Actions (calls on a single stage) by which copies from host memory come ahead of their use.
    """
    found = []
    for stage in range(flow.num_stages):
        least: list[ActionMemory] = []
        for _, moment in _moments_of(plan, flow, stage, horizon):
            if not any(known.covers(moment) for known in least):
                least = [known for known in least if not moment.covers(known)]
                least.append(moment)
        found.append(tuple(least))
    return tuple(found)


def _moments_of(plan: Plan, flow: Flow, stage: int, horizon: int) -> Iterator[tuple[Action, ActionMemory]]:
    actions = plan.stages[stage]
    by_calls = flow.num_stages == 1
    # Position of the backward of each segment and microbatch.
    uses = {
        (action.segment, action.microbatch): position
        for position, action in enumerate(actions)
        if action.kind in ("B", "I")
    }
    there: list[tuple[int, int]] = []
    for position, action in enumerate(actions):
        place = (action.segment, action.microbatch)
        if place not in uses:  # without a backward nothing is kept
            continue
        if action.kind == "F":
            there.append(place)
        running = None
        if action.kind != "W":
            recomputes = action.kind != "F"
            stays = action.kind == "I" or (not by_calls and uses[place] <= position + horizon)
            window = 0 if stays else horizon + 1 if recomputes else LEAVING_CALLS
            running = Running(SegmentId(stage, action.segment), recomputes, action.kind != "I", window)
        last_near = position + (horizon if not by_calls else 0 if action.kind in ("I", "W") else -1)
        moment = ActionMemory(
            _counted(stage, [each for each in there if running is None or not running.frees or each != place]),
            _counted(stage, [each for each in there if uses[each] <= last_near]),
            running,
        )
        yield action, moment
        if action.kind in ("B", "W"):
            there.remove(place)


def used_bytes(moment: ActionMemory, flow: Flow) -> int:
    used = sum(count * sum(call.saved for call in flow.kept[segment]) for segment, count in moment.kept.items())
    used += sum(count * sum(call.offloaded for call in flow.kept[segment]) for segment, count in moment.near.items())
    return used if moment.running is None else used + _passing(flow.kept[moment.running.segment], moment.running)


def _passing(calls: Sequence[KeptBytes], running: Running) -> int:
    """Peak bytes of a running segment, forward or backward."""
    before = most = 0
    for number, call in enumerate(calls):
        before += call.saved if running.frees else 0
        first = max(0, number + 1 - running.window)
        window = sum(each.offloaded for each in calls[first : number + 1]) if running.window else 0
        most = max(most, before + window + (call.again if running.recomputes else 0))
    return most


def peak_saved_bytes(plan: Plan, flow: Flow, horizon: int = DEFAULT_HORIZON) -> tuple[int, ...]:
    """Peak bytes of activations of each stage."""
    is_plain = not any(call.again or call.offloaded for calls in flow.kept.values() for call in calls)
    if not is_plain:
        found = moments(plan, flow, horizon)
        return tuple(max((used_bytes(moment, flow) for moment in mine), default=0) for mine in found)
    saved = {
        # Without a backward nothing is kept.
        segment: sum(call.saved for call in calls) if segment in flow.backward_needs else 0
        for segment, calls in flow.kept.items()
    }
    peaks = []
    for stage, actions in enumerate(plan.stages):
        held = peak = 0
        for action in actions:
            if action.kind == "F":
                held += saved[SegmentId(stage, action.segment)]
                peak = max(peak, held)
            elif action.kind != "I":
                held -= saved[SegmentId(stage, action.segment)]
        peaks.append(peak)
    return tuple(peaks)


def fullest_moments(
    plan: Plan, flow: Flow, gradients: Mapping[str, int], horizon: int = DEFAULT_HORIZON
) -> tuple[tuple[int, int], ...]:
    """The moment of each stage with most activations and gradients, in a step that begins without gradients.

    Args:
        plan: Order of the actions.
        flow: Segments of one microbatch.
        gradients: Bytes of the gradients of each unit.
        horizon: As for :func:`moments`.

    Returns:
        For each stage: bytes of activations, and of the gradients that do not exist yet.
    """
    found = []
    for stage in range(flow.num_stages):
        missing = {name: gradients.get(name, 0) for segment in flow.kept for name in _units(flow, segment, stage)}
        most = (0, 0)  # at the end of the step
        for action, moment in _moments_of(plan, flow, stage, horizon):
            # While a backward makes gradients it frees activations, so that its ends are its fullest moments.
            most = max(most, (used_bytes(moment, flow), sum(missing.values())), key=lambda each: each[0] - each[1])
            if action.kind in ("B", "W"):
                for name in _units(flow, SegmentId(stage, action.segment), stage):
                    missing.pop(name, None)
        found.append(most)
    return tuple(found)


def _units(flow: Flow, segment: SegmentId, stage: int) -> set[str]:
    return {call.name for call in flow.kept[segment]} if segment.stage == stage else set()


def _counted(stage: int, places: Iterable[tuple[int, int]]) -> Mapping[SegmentId, int]:
    """Number of microbatches per segment."""
    return Counter(SegmentId(stage, number) for number, _ in places)


def _plus(counts: Mapping[SegmentId, int], segment: SegmentId) -> Mapping[SegmentId, int]:
    return {**counts, segment: counts.get(segment, 0) + 1}


def _at_least(mine: Mapping[SegmentId, int], theirs: Mapping[SegmentId, int]) -> bool:
    return all(mine.get(segment, 0) >= count for segment, count in theirs.items())
