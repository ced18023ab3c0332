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
    steps = (
        _plainly(plan, flow, stage) if is_plain else _exactly(plan, flow, stage, horizon)
        for stage in range(flow.num_stages)
    )
    return tuple(_peak_of(flow, stage, moments, gradients) for stage, moments in enumerate(steps))


def _peak_of(
    flow: Flow,
    stage: int,
    moments: Iterable[tuple[Action, int, Running | None]],
    gradients: Mapping[str, int],
) -> Peak:
    """The fullest moment of a stage, of which each has the activations beside the segment that runs."""
    mine = [segment for segment in flow.kept if segment.stage == stage]
    missing = {call.name: gradients.get(call.name, 0) for segment in mine for call in flow.kept[segment]}
    # At the end of the step no call runs.
    most = Peak(working=min([0, *(call.working for segment in mine for call in flow.kept[segment])]))
    # Segments whose gradients do not exist yet.
    early = {segment.number for segment in mine} if gradients else set()
    # Until the next gradients come, only the fullest moment of each running segment matters.
    fullest: dict[Running | None, int] = {}
    for action, around, running in moments:
        if action.segment in early and action.kind in ("B", "W"):
            early.remove(action.segment)
            first = {call.name for call in flow.kept[SegmentId(stage, action.segment)]} & missing.keys()
            coming = {name: missing[name] for name in first} if action.kind == "B" else NOTHING
            found = [*_peaks_of(flow, fullest, missing), *_peaks_of(flow, {running: around}, missing, coming)]
            most = max([most, *found], key=_total)
            missing = {name: nbytes for name, nbytes in missing.items() if name not in first}
            fullest = {}
        elif around > fullest.get(running, -1):
            fullest[running] = around
    return max([most, *_peaks_of(flow, fullest, missing)], key=_total)


def _peaks_of(
    flow: Flow,
    fullest: Mapping[Running | None, int],
    missing: Mapping[str, int],
    coming: Mapping[str, int] = NOTHING,
) -> Iterator[Peak]:
    """Moments with the activations ``fullest`` beside what runs, without the gradients ``missing``."""
    lacking = sum(missing.values()) - sum(coming.values())
    for running, around in fullest.items():
        inside = Peak() if running is None else _inside(flow, running, coming)
        yield Peak(around + inside.activations, inside.working, lacking + inside.missing)


def _total(peak: Peak) -> int:
    return peak.total


def _exactly(plan: Plan, flow: Flow, stage: int, horizon: int) -> Iterator[tuple[Action, int, Running | None]]:
    """Each action, with the activations beside the segment that it runs."""
    for action, moment in _moments_of(plan, flow, stage, horizon):
        yield action, _around(moment, flow), moment.running


def _plainly(plan: Plan, flow: Flow, stage: int) -> Iterator[tuple[Action, int, Running | None]]:
    """The same if nothing is recomputed or offloaded, in less time: a plan of a large job has a million actions."""
    # Per kind of action and segment: activations that it adds, that it has itself and that it frees, and what it runs.
    table: dict[tuple[str, int], tuple[int, int, int, Running | None]] = {}
    for segment in flow.backward_needs:  # without a backward nothing is kept
        if segment.stage == stage:
            saved = sum(call.saved for call in flow.kept[segment])
            table["F", segment.number] = (saved, saved, 0, Running(segment, False, True, 0))
            table["B", segment.number] = (0, saved, saved, Running(segment, True, True, 0))
            table["I", segment.number] = (0, 0, 0, Running(segment, True, False, 0))
            table["W", segment.number] = (0, 0, saved, None)
    held = 0
    for action in plan.stages[stage]:
        if found := table.get((action.kind, action.segment)):
            added, own, freed, running = found
            held += added
            yield action, held - own, running
            held -= freed


def _counted(stage: int, places: Iterable[tuple[int, int]]) -> Mapping[SegmentId, int]:
    """Number of microbatches per segment."""
    return Counter(SegmentId(stage, number) for number, _ in places)


def _plus(counts: Mapping[SegmentId, int], segment: SegmentId) -> Mapping[SegmentId, int]:
    return {**counts, segment: counts.get(segment, 0) + 1}


def _at_least(mine: Mapping[SegmentId, int], theirs: Mapping[SegmentId, int]) -> bool:
    return all(mine.get(segment, 0) >= count for segment, count in theirs.items())
