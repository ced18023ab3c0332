"""Joint choice of partition and schedule, against brute force over contiguous partitions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.device_model import HostLink, Machine
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.work import Effort, Efforts, Link, SavedBytes, StorageBytes, Work
from smp_strategy.planning.activation_budget.allocate import ActivationPlan
from smp_strategy.planning.partition.partition import Partition, UnitActivations
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.planning.planner import PlanningInput, as_given, best_partition, policies_of, problem_under, simulated
from smp_strategy.planning.schedule.policies import Policy
from tests.unit.planning.partition.problems import chain, programs

EXACT = 1e-9
POLICIES = [
    Policy("simple"),
    Policy("interleaved"),
    Policy("interleaved", 1, 3),
    Policy("1f1b"),
    Policy("1f1b", 1, 2),
    Policy("1f1b", 2),
    Policy("1f1b", 3),
    Policy("zb-h1"),
    Policy("zb-h2"),
    Policy("zb-v", 2),
]


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> tuple[SMPConfig, PlanningInput, int, Policy]:
    policy = draw(st.sampled_from(POLICIES))
    num_stages = draw(st.integers(1, 4))
    num_units = draw(st.integers(num_stages * policy.num_chunks, max(10, num_stages * policy.num_chunks)))
    if draw(st.booleans()):
        trace, work = chain([Work(*(float(draw(st.integers(0, 9))) for _ in range(3))) for _ in range(num_units)])
    else:
        trace, work = draw(programs(num_units))
    sizes = [HeldBytes(draw(st.integers(0, 9)), 3, 6) for _ in range(5)]
    parameters = {f"u{i}": {i % 5: sizes[i % 5]} for i in range(num_units)}
    program = PlanningInput(
        trace=trace, work=work, parameters=parameters, link=Link(draw(st.sampled_from([0.0, 1.0])), 5.0)
    )
    config = SMPConfig(
        pipeline_parallel_degree=num_stages,
        microbatches=draw(st.integers(1, 7)),
        memory_weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    return config, program, num_stages, policy


@settings(max_examples=40, deadline=None)
@given(settings_of_a_run())
def test_under_every_policy_no_contiguous_partition_costs_less_than_the_bound(run):
    config, program, num_stages, policy = run
    found = best_partition(config, program, num_stages, policies=[policy])
    problem = problem_under(config, program, num_stages, policy)
    num_chunks = num_stages * policy.num_chunks
    cuts = itertools.combinations(range(1, len(problem.units)), num_chunks - 1)
    costs = []
    for starts in ((0, *cut) for cut in itertools.islice(cuts, 300)):
        stage_of = problem.stage_of(starts)
        score = simulated(program, problem, policy, stage_of)
        costs.append(problem.cost(score.step_seconds, max(problem.memory(stage_of, score))))
    assert found.lower_bound <= min(costs) * (1 + EXACT)
    if found.is_optimal:
        assert found.cost <= min(costs) * (1 + EXACT)


def gpt(**changes) -> PlanningInput:
    """Eight blocks, and a head as heavy as three of them."""
    trace, work = chain([Work(0.2, 0, 0.2), *[Work(1, 1, 1)] * 8, Work(3, 3, 3)], saved=10)
    parameters = {f"u{i}": {i: HeldBytes(10, 10, 20)} for i in range(10)}
    return PlanningInput(**{"trace": trace, "work": work, "parameters": parameters, "link": Link.instant(), **changes})


def config(**changes) -> SMPConfig:
    return SMPConfig(**{"pipeline_parallel_degree": 2, "microbatches": 8, "memory_weight": 0.0, **changes})


def test_of_several_policies_the_one_with_the_fastest_partition_is_taken():
    policies = [Policy("simple"), Policy("1f1b"), Policy("zb-h2")]
    best = best_partition(config(), gpt(), 2, policies=policies)
    alone = {policy.name: best_partition(config(), gpt(), 2, policies=[policy]) for policy in policies}
    assert best.schedule == "zb-h2"
    assert best.cost == min(partition.cost for partition in alone.values())


def test_a_read_takes_no_time_whatever_it_is_said_to_cost():
    trace, work = chain([Work(1, 1, 1)] * 4)
    read = Event("read", "item", trace.events[-1].outputs, ())
    windows, expected = (
        problem_under(config(), gpt(trace=Trace([*trace.events, read], None), work=each), 2, Policy("1f1b")).windows
        for each in ({**work, 4: Work(100.0)}, work)
    )
    assert windows == expected


def test_auto_chooses_a_layout_with_a_policy_and_another_schedule_keeps_its_name():
    names = {policy.name for policy in policies_of(config(pipeline="auto"), 2, 10)}
    assert {"1f1b", "interleaved", "zb-h1", "zb-v"} <= names
    assert best_partition(config(pipeline="auto"), gpt(), 2).schedule in names
    assert best_partition(config(pipeline="simple"), gpt(), 2).schedule == "simple"


def test_less_memory_costs_time():
    free = best_partition(config(), gpt(), 2, policies=[Policy("simple")])
    peak = max(stage.memory_bytes for stage in free.stages)
    tight = best_partition(config(), gpt(memory_limits=(peak - 60, None)), 2, policies=[Policy("simple")])
    assert tight.fits
    assert tight.step_seconds > free.step_seconds


def test_a_partition_by_hand_is_priced_and_has_no_bound():
    found = as_given(config(), gpt(), 2, {f"u{i}": int(i >= 5) for i in range(10)})
    assert found.lower_bound == 0.0
    assert not found.is_optimal
    assert found.step_seconds > best_partition(config(), gpt(), 2).step_seconds


def test_a_partition_by_hand_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"given does not fit `memory_limit`: .*stage 1 \d+ of 100"):
        as_given(config(), gpt(memory_limits=(None, 100)), 2, {f"u{i}": int(i >= 5) for i in range(10)})


SMALL = Machine(1.0, 1.0, 0.0, Link.instant(), HostLink(1.0, is_beside=False))


@st.composite
def full_stages(draw: st.DrawFn) -> PlanningInput:
    """Three to five units of different sizes, and limits that may be too small for what they keep."""
    size = st.integers(1, 20)
    trace, work = chain(
        [Work(*(float(draw(st.integers(1, 4))) for _ in range(3))) for _ in range(draw(st.integers(3, 5)))]
    )
    events = []
    for event in trace.events:
        memories = (
            StorageBytes(draw(size), "input"),
            StorageBytes(draw(size), "product"),
            StorageBytes(20 + draw(size), "other"),
        )
        kept = SavedBytes(memories, Effort(flops=3, other_bytes=1), Effort(other_bytes=1))
        effort = Efforts(Effort(flops=3, other_bytes=1))
        events.append(event._replace(effort=effort, saved_bytes=kept.saved_bytes, kept=kept))
    names = [event.name for event in events]
    return PlanningInput(
        trace=Trace(events, trace.loss),
        work=work,
        parameters={name: {number: HeldBytes(3, 3, 6)} for number, name in enumerate(names)},
        link=Link.instant(),
        memory_limits=tuple(draw(st.integers(60, 400)) for _ in range(2)),
        relief=ActivationPlan(machine=SMALL, free=frozenset(names)),
    )


@settings(max_examples=12, deadline=None)
@given(full_stages(), st.sampled_from([Policy("1f1b"), Policy("simple"), Policy("interleaved")]))
def test_cuts_and_what_units_keep_are_the_best_together(program, policy):
    options = config(microbatches=3)
    problem = problem_under(options, program, 2, policy)
    names = [unit.name for unit in problem.units]

    def steps_that_fit(stage_of):
        """Seconds of a step under each choice of what units keep."""
        for picked in itertools.product(program.relief.choices, repeat=len(names)):
            given_all = program.relief.taking(dict(zip(names, picked, strict=True)))
            score = simulated(program, problem, policy, stage_of, given_all)
            if problem.fits(problem.memory(stage_of, score)):
                yield score.step_seconds

    fitting = [seconds for cut in range(1, len(names)) for seconds in steps_that_fit(problem.stage_of((0, cut)))]
    if not fitting:
        with pytest.raises(ConfigError, match="No partition fits"):
            best_partition(options, program, 2, policies=[policy])
        return
    found = best_partition(options, program, 2, policies=[policy])
    fitting += steps_that_fit(found.stage_of)  # its stages may have units that do not follow each other
    assert found.fits
    assert found.lower_bound <= found.cost * (1 + EXACT)
    if policy.name == "interleaved":  # its order follows the work: the step may be shorter if a unit does more
        assert found.step_seconds >= min(fitting) * (1 - EXACT)
    else:
        assert found.step_seconds == pytest.approx(min(fitting))


def test_what_fits_as_it_is_is_not_treated():
    program = gpt(memory_limits=(10_000, 10_000), relief=ActivationPlan(machine=SMALL, free=frozenset({"u1", "u2"})))
    found = best_partition(config(), program, 2)
    assert found.activation_policies == {}
    assert found.step_seconds == best_partition(config(), gpt(), 2).step_seconds


def test_a_partition_tells_what_its_units_spare_and_take():
    every = {f"u{i}": ActivationPolicy(recompute="all") for i in range(10)}
    found = best_partition(config(), gpt(relief=ActivationPlan(machine=SMALL, fixed=every)), 2)
    plain = best_partition(config(), gpt(), 2)
    block = found.units[1]
    assert block.relief == UnitActivations(treatment=every["u1"], spared_bytes=9, seconds=1.0)
    assert (block.activation_bytes, block.work, block.seconds) == (1, Work(1, 1, 1), 4.0)
    assert [stage.all_kept_bytes for stage in found.stages] == [stage.activation_bytes for stage in plain.stages]
    assert found.step_seconds > plain.step_seconds
    assert Partition.from_json(found.to_json()) == found
