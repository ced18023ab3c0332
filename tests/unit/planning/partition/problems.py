"""Small partitioning problems on chains and branching programs, and the simulation that scores candidates."""

import itertools
from collections.abc import Mapping

from hypothesis import strategies as st

from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.partition.problem import (
    HeldBytes,
    InFlight,
    PartitionProblem,
    Promise,
    Score,
    Setting,
    problem_of,
)
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.peak_memory import peaks
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate


class Case:
    """A problem, and what simulates its candidates."""

    def __init__(
        self, trace: Trace, work: Mapping[int, Work], parameters, setting: Setting, active: int, everywhere=None
    ) -> None:
        self.trace, self.work, self.setting, self.active = trace, work, setting, active
        self.problem: PartitionProblem = problem_of(trace, work, parameters, setting, everywhere=everywhere)

    def evaluate(self, stage_of: Mapping[str, int]) -> Score:
        setting = self.setting
        flow = route(self.trace, stage_of, setting.num_stages, self.work)
        for segment in flow.work:
            speed = setting.speed(segment.stage)
            flow.work[segment] = Work(*(seconds / speed for seconds in flow.work[segment]))
        plan = simulate(flow, setting.num_microbatches, Policy("interleaved", active_microbatches=self.active))
        return Score(plan.makespan, peaks(plan, flow))

    def candidates(self) -> list[tuple[int, ...]]:
        num_chunks = len(self.setting.stage_of_chunk)
        cuts = itertools.combinations(range(1, len(self.problem.units)), num_chunks - 1)
        return [(0, *cut) for cut in cuts]

    def cost(self, stage_of: Mapping[str, int]) -> float | None:
        """``None`` for a candidate beyond the limits of memory."""
        score = self.evaluate(stage_of)
        memory = self.problem.memory(stage_of, score)
        return self.problem.cost(score.step_seconds, max(memory)) if self.problem.fits(memory) else None


def chain(works, *, saved: int = 1, outputs: int = 1) -> tuple[Trace, dict[int, Work]]:
    """Units ``u0``, ``u1`` ... one after the other, the last of which makes the loss."""
    events, last = [], ()
    for index in range(len(works)):
        value = Value(index, outputs, requires_grad=True)
        events.append(Event("unit", f"u{index}", last, (value,), saved_bytes=saved))
        last = (value,)
    return Trace(events, len(works) - 1), dict(enumerate(works))


@st.composite
def programs(draw: st.DrawFn, num_units: int) -> tuple[Trace, dict[int, Work]]:
    """A program that calls every unit, some twice, with operations between them, on any values made before."""
    calls = [f"u{i}" for i in range(num_units)]
    calls += draw(st.lists(st.sampled_from([*calls, "op", "read"]), max_size=4))
    is_chain = draw(st.booleans())
    calls = calls if is_chain else draw(st.permutations(calls))
    values: list[Value] = []
    events, work = [], {}
    for call in calls:
        kind = call if call in ("op", "read") else "unit"
        if kind != "unit" and not values:
            continue
        inputs = values[-1:] if is_chain else []
        if values and not is_chain:
            inputs = draw(st.lists(st.sampled_from(values), min_size=kind != "unit", max_size=2, unique=True))
        outputs = ()
        if kind != "read":
            trains = is_chain or draw(st.integers(0, 4)) > 0
            outputs = (Value(len(values), draw(st.integers(0, 9)), trains),)
        values += outputs
        work[len(events)] = Work(*(float(draw(st.integers(0, 9))) for _ in range(3)))
        events.append(Event(kind, call, tuple(inputs), outputs, saved_bytes=draw(st.integers(0, 20))))
    losses = [value.id for value in values if value.requires_grad][-2:]
    return Trace(events, draw(st.sampled_from([*losses, None]))), work


@st.composite
def cases(draw: st.DrawFn, *, max_units: int = 10) -> Case:
    """Up to 4 stages with 1 to 3 chunks each; parameters that are partly shared; limits and speeds or none."""
    num_stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3))
    num_units = draw(st.integers(num_stages, max(max_units, num_stages)))
    chunks = min(chunks, num_units // num_stages)
    placement = [*range(num_stages)] * chunks
    if chunks == 2 and draw(st.booleans()):
        placement = [*reversed(range(num_stages)), *range(num_stages)]
    trace, work = draw(programs(num_units))
    sizes = draw(st.lists(st.integers(0, 50), min_size=12, max_size=12))
    trained = draw(st.lists(st.booleans(), min_size=12, max_size=12))
    held = [HeldBytes(size, size * trained[key], 2 * size * trained[key], size // 2) for key, size in enumerate(sizes)]
    parameters = {
        f"u{index}": {key: held[key] for key in draw(st.sets(st.integers(0, 11), max_size=3))}
        for index in range(num_units)
    }
    everywhere = {key: held[key % 12] for key in draw(st.sets(st.integers(10, 13)))}  # two may be those of units, too
    num_microbatches = draw(st.integers(1, 6))
    active = draw(st.integers(1, 6))
    limited = draw(st.booleans())
    setting = Setting(
        num_stages=num_stages,
        stage_of_chunk=tuple(placement),
        num_microbatches=num_microbatches,
        memory_weight=draw(st.sampled_from([0.0, 0.2, 0.8, 1.0])),
        memory_limits=tuple(draw(st.integers(50, 900)) for _ in range(num_stages)) if limited else (),
        stage_speeds=tuple(draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(num_stages)),
        in_flight=(InFlight(Promise(1, active), Promise(1, active), active),) * num_stages,
        state_shards=draw(st.integers(1, 3)),
    )
    return Case(trace, work, parameters, setting, active, everywhere)
