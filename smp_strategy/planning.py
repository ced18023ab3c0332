"""Layout and schedule together: which partition is best under which policy, and the plan of a step.

The partitioner asks what a candidate would take; the answer is a simulation under the policy. Where the policy is free
(``pipeline=auto``), every kind of layout (one chunk per stage, several, the V of ZB-V) gets its best partition, and
the policies for it are compared; a simpler one wins unless another is better by more than a hundredth. The plan of a
step then follows from what was found, see :func:`smp_strategy.pipeline.search.search`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from smp_strategy.config import SMPConfig
from smp_strategy.partition.costs import Held
from smp_strategy.partition.partition import Partition
from smp_strategy.partition.problem import InFlight, Problem, Score, Setting
from smp_strategy.partition.reading import problem_of
from smp_strategy.partition.solver import solve
from smp_strategy.pipeline.check import check
from smp_strategy.pipeline.policies import Policy, candidates
from smp_strategy.pipeline.routing import Flow, route
from smp_strategy.pipeline.schedule import Plan, peak_saved_bytes
from smp_strategy.pipeline.search import NOTICEABLE, search
from smp_strategy.pipeline.simulate import simulate
from smp_strategy.trace.events import Trace
from smp_strategy.trace.machine import Machine, modelled_work
from smp_strategy.trace.work import Link, Work

__all__ = ["Costs", "best_partition", "plan_of", "policies_of", "score_of"]


class Costs(NamedTuple):
    """What a microbatch does and how long that takes."""

    trace: Trace
    work: Mapping[int, Work]
    """Of each event, by position."""
    link: Link

    @classmethod
    def modelled(cls, trace: Trace, machine: Machine) -> "Costs":
        """What ``machine`` would take."""
        return cls(trace, modelled_work(trace.events, machine), machine.link)


def policies_of(config: SMPConfig, num_stages: int, num_units: int) -> list[Policy]:
    """The policies that the options allow, the simpler ones first."""
    if config.pipeline != "auto":
        return [Policy(config.pipeline, config.chunks_per_stage or 1, config.active_microbatches)]
    return candidates(
        num_stages,
        config.num_microbatches(num_stages),
        num_units=num_units,
        num_chunks=config.virtual_pipeline_degree,
        active_microbatches=config.active_microbatches,
    )


def best_partition(
    config: SMPConfig,
    costs: Costs,
    parameters: Mapping[str, Mapping[int, Held]],
    num_stages: int,
    given: Mapping[str, int] | None = None,
) -> Partition:
    """The partition of least cost, and its policy.

    Args:
        config: all options.
        costs: of a microbatch.
        parameters: what each unit's parameters take, by unit in order of registration.
        num_stages: number of stages.
        given: stage of each unit, where that is decided already; only the policy is sought.
    """
    policies = policies_of(config, num_stages, len(parameters))
    best: Partition | None = None
    for layout in dict.fromkeys(policy.layout for policy in policies):
        stage_of = given
        for policy in (policy for policy in policies if policy.layout == layout):
            problem = problem_of(costs.trace, costs.work, parameters, _setting(config, policy, num_stages))
            found = _partition(config, costs, problem, policy, stage_of)
            stage_of = stage_of or found.stage_of
            if best is None or found.cost < best.cost * (1 - NOTICEABLE):
                best = found
    assert best is not None
    return best


def _partition(
    config: SMPConfig, costs: Costs, problem: Problem, policy: Policy, stage_of: Mapping[str, int] | None
) -> Partition:
    """The best partition under ``policy``, or what ``stage_of`` is worth under it."""

    def evaluate(candidate: Mapping[str, int]) -> Score:
        return score_of(config, policy, costs, problem.setting.num_stages, candidate)

    if stage_of is not None:
        return Partition.of(problem, stage_of, evaluate(stage_of), schedule=str(policy))
    found = solve(problem, evaluate)
    return Partition.of(problem, found.stage_of, found.score, schedule=str(policy), lower_bound=found.lower_bound)


def _setting(config: SMPConfig, policy: Policy, num_stages: int) -> Setting:
    return Setting(
        num_stages=num_stages,
        stage_of_chunk=tuple(
            policy.stage_of_chunk(chunk, num_stages) for chunk in range(policy.num_chunks * num_stages)
        ),
        num_microbatches=config.num_microbatches(num_stages),
        memory_weight=config.resolved_memory_weight,
        memory_limits=config.memory_limits(num_stages) or (),
        stage_speeds=config.speeds(num_stages),
        splits_backward=policy.splits_backward,
        in_flight=tuple(InFlight(1, policy.most_in_flight(stage, num_stages)) for stage in range(num_stages)),
    )


def score_of(config: SMPConfig, policy: Policy, costs: Costs, num_stages: int, stage_of: Mapping[str, int]) -> Score:
    """What a step takes, time and activations, if the units are placed like this."""
    flow = _flow(config, costs, num_stages, stage_of)
    plan = simulate(flow, config.num_microbatches(num_stages), policy, costs.link)
    return Score(plan.makespan, peak_saved_bytes(plan, flow))


def _flow(config: SMPConfig, costs: Costs, num_stages: int, stage_of: Mapping[str, int]) -> Flow:
    flow = route(costs.trace, stage_of, num_stages, costs.work)
    speeds = config.speeds(num_stages)
    if set(speeds) == {1.0}:
        return flow
    work = {segment: cost.scaled(1 / speeds[segment.stage]) for segment, cost in flow.work.items()}
    return replace(flow, work=work)


def plan_of(config: SMPConfig, costs: Costs, partition: Partition, num_microbatches: int) -> Plan:
    """The plan of a step, checked.

    Args:
        config: all options.
        costs: of a microbatch of this kind of step.
        partition: where the units are.
        num_microbatches: microbatches of this step.
    """
    num_stages = len(partition.stages)
    flow = _flow(config, costs, num_stages, partition.stage_of)
    if config.pipeline == "auto":
        found = Policy.parse(partition.schedule)
        limits = [stage.memory_limit for stage in partition.stages]
        free = [
            None if limit is None else limit - stage.held.total
            for limit, stage in zip(limits, partition.stages, strict=True)
        ]
        policies = policies_of(config, num_stages, len(partition.units))
        policies = [policy for policy in policies if policy.layout == found.layout] or [found]
        active = config.active_microbatches
        plan = search(flow, num_microbatches, policies, costs.link, most_bytes=free, active_microbatches=active).plan
    else:
        (policy,) = policies_of(config, num_stages, len(partition.units))
        plan = simulate(flow, num_microbatches, policy, costs.link)
    check(plan, flow, num_microbatches)
    return plan
