"""Partition and schedule together, against brute force over contiguous partitions."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from smp_strategy.config import SMPConfig
from smp_strategy.partitioner.costs import Held
from smp_strategy.pipeline.policies import Policy
from smp_strategy.planning import (
    Program,
    best_partition,
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
    num_units = draw(st.integers(num_stages * policy.num_chunks, max(9, num_stages * policy.num_chunks)))
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
