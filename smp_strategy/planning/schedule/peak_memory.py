"""Peak memory of activations of each stage under a schedule, with recomputation and offload, and working memory.

A segment keeps its activations from its forward to the end of its backward, with four refinements:

* Recomputed activations come back unit by unit during backward, beside the activations that the units before keep. If
  weight gradients are postponed, the activations of other units stay until they are computed.
* Offloaded activations are on the device near their use: from *horizon* actions before their backward on, and for some
  calls after their forward, while they are copied away. A single stage counts calls of units instead of actions.
* Beside them are the temporary results and the gradients of the call that runs
  (:mod:`smp_strategy.model.trace.working_bytes`).
* Only moments that no other moment covers matter: a moment covers another if it is at least as full, whatever units
  keep.

If batches are accumulated, all gradients exist at every moment. In a step by itself those of a unit exist from its
first backward on.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.flow import Flow

__all__ = ["DEFAULT_HORIZON", "ActionMemory", "Peak", "moments", "peak_saved_bytes", "peaks", "used_bytes"]

DEFAULT_HORIZON = 4
NOTHING: Final[Mapping[str, int]] = {}
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
    """Bytes of activations and working memory at a moment."""
    return _around(moment, flow) + (0 if moment.running is None else _inside(flow, moment.running).total)


def _around(moment: ActionMemory, flow: Flow) -> int:
    """Bytes of activations at a moment, without those of the running segment."""
    used = sum(count * sum(call.saved for call in flow.kept[segment]) for segment, count in moment.kept.items())
    near = moment.near.items()
    return used + sum(count * sum(call.offloaded for call in flow.kept[segment]) for segment, count in near)


class Peak(NamedTuple):
    """Memory of a stage when it is fullest."""

    activations: int = 0
    working: int = 0
    """Temporary results of the running call, and gradients on their way."""
    missing: int = 0
    """Gradients of parameters that do not exist yet."""

    @property
    def total(self) -> int:
        """Bytes beside the parameters with all their gradients and optimizer state."""
        return self.activations + self.working - self.missing


def _inside(flow: Flow, running: Running, coming: Mapping[str, int] = NOTHING) -> Peak:
    """The fullest moment of a running segment.

    Args:
        flow: Segments.
        running: The running one.
        coming: Gradients of units that its backward is the first to compute.
    """
    calls, before, found = flow.kept[running.segment], 0, list[Peak]()
    missing: dict[str, int] = {}
    for number, call in enumerate(calls):
        before += call.saved if running.frees else 0
        missing[call.name] = coming.get(call.name, 0)
        first = max(0, number + 1 - running.window)
        window = sum(each.offloaded for each in calls[first : number + 1]) if running.window else 0
        there = before + window + (call.again if running.recomputes else 0)
        found.append(Peak(there, call.working, sum(missing.values()) if coming else 0))
    return max(found, key=_total, default=Peak())


def peak_saved_bytes(plan: Plan, flow: Flow, horizon: int = DEFAULT_HORIZON) -> tuple[int, ...]:
    """Peak bytes of activations and working memory of each stage, beside all gradients."""
    return tuple(peak.total for peak in peaks(plan, flow, horizon))


def peaks(
    plan: Plan, flow: Flow, horizon: int = DEFAULT_HORIZON, gradients: Mapping[str, int] = NOTHING
) -> tuple[Peak, ...]:
    """The moment of each stage with most activations, working memory and gradients.

    Args:
        plan: Order of the actions.
        flow: Segments of one microbatch.
        horizon: As for :func:`moments`.
        gradients: Bytes of the gradients of each unit, in a step that begins without them.
    """
    is_plain = not any(call.again or call.offloaded for calls in flow.kept.values() for call in calls)
    found = []
    for stage in range(flow.num_stages):
        missing = {name: gradients.get(name, 0) for segment in flow.kept for name in _units(flow, segment, stage)}
        known: dict[tuple[Running, int], Peak] = {}
        # At the end of the step no call runs.
        mine = [call.working for segment, calls in flow.kept.items() if segment.stage == stage for call in calls]
        most = Peak(working=min([0, *mine]))
        for action, around, running in (
            _plainly(plan, flow, stage) if is_plain else _exactly(plan, flow, stage, horizon)
        ):
            names = _units(flow, SegmentId(stage, action.segment), stage) if gradients else ()
            coming = {name: missing[name] for name in names if name in missing} if action.kind == "B" else NOTHING
            inside = Peak()
            if running is not None:
                key = (running, sum(coming.values()))
                inside = known[key] = known.get(key) or _inside(flow, running, coming)
            lacking = sum(missing.values()) - sum(coming.values())
            peak = Peak(around + inside.activations, inside.working, lacking + inside.missing)
            most = max(most, peak, key=_total)
            if action.kind in ("B", "W"):
                for name in names:
                    missing.pop(name, None)
        found.append(most)
    return tuple(found)


def _total(peak: Peak) -> int:
    return peak.total


def _exactly(plan: Plan, flow: Flow, stage: int, horizon: int) -> Iterator[tuple[Action, int, Running | None]]:
    """Each action, with the activations beside the segment that it runs."""
    for action, moment in _moments_of(plan, flow, stage, horizon):
        yield action, _around(moment, flow), moment.running


def _plainly(plan: Plan, flow: Flow, stage: int) -> Iterator[tuple[Action, int, Running | None]]:
    """The same if nothing is recomputed or offloaded, in less time."""
    held = 0
    saved = {segment: sum(call.saved for call in calls) for segment, calls in flow.kept.items()}
    for action in plan.stages[stage]:
        segment = SegmentId(stage, action.segment)
        if segment not in flow.backward_needs:  # without a backward nothing is kept
            continue
        mine = saved[segment]
        held += mine if action.kind == "F" else 0
        frees = action.kind in ("F", "B")
        running = None if action.kind == "W" else Running(segment, action.kind != "F", frees, 0)
        yield action, held - mine if frees else held, running
        held -= mine if action.kind in ("B", "W") else 0


def _units(flow: Flow, segment: SegmentId, stage: int) -> set[str]:
    return {call.name for call in flow.kept[segment]} if segment.stage == stage else set()


def _counted(stage: int, places: Iterable[tuple[int, int]]) -> Mapping[SegmentId, int]:
    """Number of microbatches per segment."""
    return Counter(SegmentId(stage, number) for number, _ in places)


def _plus(counts: Mapping[SegmentId, int], segment: SegmentId) -> Mapping[SegmentId, int]:
    return {**counts, segment: counts.get(segment, 0) + 1}


def _at_least(mine: Mapping[SegmentId, int], theirs: Mapping[SegmentId, int]) -> bool:
    return all(mine.get(segment, 0) >= count for segment, count in theirs.items())
