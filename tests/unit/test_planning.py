"""Partition and schedule together, against brute force over contiguous partitions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_strategy.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.partitioner.costs import Held
from smp_strategy.pipeline.policies import Policy
from smp_strategy.planning import (
    Program,
    as_given,
    best_partition,
    policies_of,
    problem_under,
    simulated,
)
from smp_strategy.trace.work import Link, Work
from tests.unit.partitioner.problems import chain, programs

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
def settings_of_a_run(draw: st.DrawFn) -> tuple[SMPConfig, Program, int, Policy]:
    policy = draw(st.sampled_from(POLICIES))
    num_stages = draw(st.integers(1, 4))
    num_units = draw(st.integers(num_stages * policy.num_chunks, max(10, num_stages * policy.num_chunks)))
    if draw(st.booleans()):
        trace, work = chain([Work(*(float(draw(st.integers(0, 9))) for _ in range(3))) for _ in range(num_units)])
    else:
        trace, work = draw(programs(num_units))
    sizes = [Held(draw(st.integers(0, 9)), 3, 6) for _ in range(5)]
    parameters = {f"u{i}": {i % 5: sizes[i % 5]} for i in range(num_units)}
    program = Program(trace=trace, work=work, parameters=parameters, link=Link(draw(st.sampled_from([0.0, 1.0])), 5.0))
    config = SMPConfig(
        pipeline_parallel_degree=num_stages,
        microbatches=draw(st.integers(1, 7)),
        memory_weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    return config, program, num_stages, policy


@settings(max_examples=120, deadline=None)
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
        score = simulated(config, program, num_stages, policy, stage_of)
        costs.append(problem.cost(score.step_seconds, max(problem.memory(stage_of, score))))
    assert found.lower_bound <= min(costs) * (1 + EXACT)
    if found.is_optimal:
        assert found.cost <= min(costs) * (1 + EXACT)


def gpt(**changes) -> Program:
    """Eight blocks, and a head as heavy as three of them."""
    trace, work = chain([Work(0.2, 0, 0.2), *[Work(1, 1, 1)] * 8, Work(3, 3, 3)], saved=10)
    parameters = {f"u{i}": {i: Held(10, 10, 20)} for i in range(10)}
    return Program(**{"trace": trace, "work": work, "parameters": parameters, "link": Link.instant(), **changes})


def config(**changes) -> SMPConfig:
    return SMPConfig(**{"pipeline_parallel_degree": 2, "microbatches": 8, "memory_weight": 0.0, **changes})


def test_of_several_policies_the_one_with_the_fastest_partition_is_taken():
    policies = [Policy("simple"), Policy("1f1b"), Policy("zb-h2")]
    best = best_partition(config(), gpt(), 2, policies=policies)
    alone = {policy.name: best_partition(config(), gpt(), 2, policies=[policy]) for policy in policies}
    assert best.schedule == "zb-h2"
    assert best.cost == min(partition.cost for partition in alone.values())


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
