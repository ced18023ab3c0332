"""Joint choice of partition and schedule: the cost of a candidate is the simulated time of a step under a policy.

The partitioner knows no schedules and the scheduler no units. The planner routes and simulates candidates, and tells
the partitioner the bounds on microbatches in flight under each policy. Under ``pipeline=auto`` every policy gets its
best partition, and the fastest of them is taken. All functions work on plain data, and give the same on every rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import final

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.work import Link, Work
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.activation_budget.allocate import ActivationPlan, CallTable, Microbatch, relieve
from smp_strategy.planning.garbage import collecting_paused
from smp_strategy.planning.memory.sharded import Turn
from smp_strategy.planning.partition.branch_and_bound import Evaluate
from smp_strategy.planning.partition.partition import Partition, StageActivations, UnitActivations
from smp_strategy.planning.partition.problem import (
    HeldBytes,
    InFlight,
    PartitionProblem,
    Promise,
    Score,
    Setting,
    problem_of,
)
from smp_strategy.planning.partition.sagemaker_tree import in_execution_order, module_tree, tree_partition
from smp_strategy.planning.partition.solver import EFFORT, does_not_fit, solve
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.policies import Policy, candidates
from smp_strategy.planning.schedule.search import NOTICEABLE
from smp_strategy.planning.schedule.simulate import SPLIT_OVERHEAD, simulate

__all__ = ["PlanningInput", "as_given", "best_partition", "policies_of", "problem_under", "simulated"]

# [Note: same decision on every rank]
# Every rank computes partition and schedule by itself, and all must get the same. So planning uses only data that are
# equal on all ranks; budgets count simulations or passes and never seconds; there are no random numbers; ties are
# broken by fixed orders; and costs are rounded, or counted in integers, where the order of their sums may differ.

# With several policies, a partition for each placement of chunks is found with QUICK simulations first; the policies
# that suit it best, MOST_FINALISTS of them, get a full search.
QUICK = 12
MOST_FINALISTS = 2
SIMULATIONS_PER_CHOICE = 8


@final
@dataclass(frozen=True, kw_only=True)
class PlanningInput:
    """Costs of a microbatch of a model, and limits of the machine."""

    trace: Trace
    work: Mapping[int, Work]
    """Work of each event, by position."""
    parameters: Mapping[str, Mapping[int, HeldBytes]]
    """Bytes that a rank holds per parameter of each unit; units in order of registration."""
    link: Link
    everywhere: Mapping[int, HeldBytes] = field(default_factory=dict)
    """Bytes that every stage holds, independent of its units."""
    whole: Mapping[str, HeldBytes] | None = None
    """Unsharded bytes of each unit's parameters, if a rank holds only a shard."""
    state_shards: int = 1
    """Ranks of a stage that share its optimizer state, by whole parameters."""
    turns: tuple[Turn, ...] = ()
    """Turns in which the calls of ``trace`` gather and reduce; its working memory is relative to the room for them."""
    least_live: int = 0
    """Elements of the largest unit that is gathered by itself; 0: none is."""
    begins_empty: bool = False
    """Whether a step begins without gradients: they are not added up over steps."""
    split_overhead: float = SPLIT_OVERHEAD
    """Overhead of a backward in two parts, as a share of the whole backward."""
    memory_limits: tuple[int | None, ...] = ()
    """Bytes per stage; empty: unlimited."""
    stage_speeds: tuple[float, ...] = ()
    """Relative speeds; empty: all equal."""
    relief: ActivationPlan = ActivationPlan(machine=Machine.nominal("cpu"))
    """Recomputation and offload of activations, decided or free."""

    @cached_property
    def calls(self) -> CallTable:
        """Costs of all calls under every choice of recomputation and offload."""
        return CallTable(self.relief, self.trace, self.work)


def policies_of(config: SMPConfig, num_stages: int, num_units: int) -> list[Policy]:
    """The policies that the options allow, the simpler ones first."""
    if config.pipeline != "auto":
        return [Policy(config.pipeline, config.chunks_per_stage or 1, config.active_microbatches)]
    found = candidates(
        num_stages,
        config.num_microbatches(num_stages),
        num_units=num_units,
        num_chunks=config.chunks_per_stage,
        active_microbatches=config.active_microbatches,
    )
    return found or [Policy("1f1b", config.chunks_per_stage or 1, config.active_microbatches)]


@collecting_paused()
def best_partition(
    config: SMPConfig, program: PlanningInput, num_stages: int, *, policies: Sequence[Policy] | None = None
) -> Partition:
    """The partition of least cost, under the schedule that makes it fastest.

    Args:
        config: All options.
        program: Costs of the model.
        num_stages: Number of stages.
        policies: Schedules to choose from; ``None``: the ones that the options allow.

    Raises:
        ConfigError: there are more chunks than units, or nothing fits the limits of memory.
    """
    policies = policies or policies_of(config, num_stages, len(program.parameters))
    scores: dict[object, Score] = {}
    if len(policies) > 1:
        first_look = _attempts(config, program, num_stages, policies, QUICK, scores)
        finalists = sorted(first_look, key=lambda policy: first_look[policy].step_seconds)[:MOST_FINALISTS]
        policies = [policy for policy in policies if policy in finalists]
    found = _attempts(config, program, num_stages, policies, None, scores)
    return _simplest(found.values())


def _attempts(
    config: SMPConfig,
    program: PlanningInput,
    num_stages: int,
    policies: Sequence[Policy],
    budget: int | None,
    scores: dict[object, Score],
) -> dict[Policy, Partition]:
    """The best partition under each policy that has a feasible one. ``scores`` keeps what has been simulated."""
    found: dict[Policy, Partition] = {}
    # Choosing recomputation or offload for a candidate costs several simulations.
    effort = EFFORT // SIMULATIONS_PER_CHOICE if program.relief.free else EFFORT
    errors: list[ConfigError] = []
    known: dict[object, Mapping[str, int]] = {}
    for policy in policies:
        problem = problem_under(config, program, num_stages, policy)
        evaluate = _once(partial(simulated, program, problem, policy), policy, scores)
        if budget is not None and policy.layout in known:
            stage_of = known[policy.layout]
            score = evaluate(stage_of)
            if problem.fits(problem.memory(stage_of, score)):
                found[policy] = _partition(program, problem, stage_of, score, policy, 0.0)
                continue
        guesses = _guesses(problem) if policy.num_chunks == 1 else ()
        try:
            solution = solve(problem, evaluate, budget=budget, effort=effort, guesses=guesses)
        except ConfigError as error:
            errors.append(error)
            continue
        known.setdefault(policy.layout, solution.stage_of)
        found[policy] = _partition(program, problem, solution.stage_of, solution.score, policy, solution.lower_bound)
    if not found:
        raise errors[0]
    return found


def _once(evaluate: Evaluate, policy: Policy, scores: dict[object, Score]) -> Evaluate:
    """``evaluate`` under ``policy``, once for each assignment of units."""

    def score(stage_of: Mapping[str, int]) -> Score:
        key = (policy, frozenset(stage_of.items()))
        if key not in scores:
            scores[key] = evaluate(stage_of)
        return scores[key]

    return score


@collecting_paused()
def as_given(config: SMPConfig, program: PlanningInput, num_stages: int, stage_of: Mapping[str, int]) -> Partition:
    """Evaluate a given assignment of units to stages, under the policy that suits it best.

    Raises:
        ConfigError: it does not fit the limits of memory.
    """
    policies = policies_of(config, num_stages, len(program.parameters))
    # A schedule made for another placement of chunks is rarely a good one.
    stages = [stage_of[unit.name] for unit in problem_under(config, program, num_stages, policies[0]).units]
    suitable = [policy for policy in policies if _has_chunks_of(policy, num_stages, stages)]
    found = []
    for policy in suitable or policies:
        problem = problem_under(config, program, num_stages, policy)
        score = simulated(program, problem, policy, stage_of)
        found.append(_partition(program, problem, stage_of, score, policy, 0.0))
    fitting = [partition for partition in found if partition.fits]
    if not fitting:
        least = min(found, key=lambda partition: max(stage.memory_bytes for stage in partition.stages))
        raise does_not_fit(
            "The partition that is given does not fit",
            [stage.memory_bytes for stage in least.stages],
            [stage.memory_limit for stage in least.stages],
        )
    return _simplest(fitting)


def _has_chunks_of(policy: Policy, num_stages: int, stages: Sequence[int]) -> bool:
    """Whether units on these ``stages``, in execution order, form the chunks of ``policy``."""
    expected = [policy.stage_of_chunk(chunk, num_stages) for chunk in range(policy.num_chunks * num_stages)]
    return [stage for stage, _ in groupby(stages)] == [stage for stage, _ in groupby(expected)]


def _simplest(partitions: Collection[Partition]) -> Partition:
    """The first partition that is nearly as fast as the fastest: simpler policies come first.

    ``memory_weight`` applies within each policy's partition only. Among policies it would favour the one that keeps
    least, and a user who names no schedule wants the fastest one that fits.
    """
    least = min(partition.step_seconds for partition in partitions)
    return next(partition for partition in partitions if partition.step_seconds * (1 - NOTICEABLE) <= least)


def problem_under(config: SMPConfig, program: PlanningInput, num_stages: int, policy: Policy) -> PartitionProblem:
    num_microbatches = config.num_microbatches(num_stages)
    setting = Setting(
        num_stages=num_stages,
        stage_of_chunk=tuple(
            policy.stage_of_chunk(chunk, num_stages) for chunk in range(policy.num_chunks * num_stages)
        ),
        num_microbatches=num_microbatches,
        memory_weight=config.resolved_memory_weight,
        memory_limits=program.memory_limits,
        stage_speeds=program.stage_speeds,
        splits_backward=policy.splits_backward,
        in_flight=tuple(_in_flight(policy, stage, num_stages, num_microbatches) for stage in range(num_stages)),
        state_shards=program.state_shards,
    )
    return problem_of(
        program.trace,
        program.work,
        program.parameters,
        setting,
        everywhere=program.everywhere,
        whole=program.whole,
        least=program.relief.least_kept(program.trace, program.work),
    )


def simulated(
    program: PlanningInput,
    problem: PartitionProblem,
    policy: Policy,
    stage_of: Mapping[str, int],
    relief: ActivationPlan | None = None,
) -> Score:
    """Simulated time and activation memory of a step under an assignment of units to stages.

    Args:
        program: Costs of the model.
        problem: Result of :func:`problem_under` for ``program`` and ``policy``.
        policy: Schedule of the step.
        stage_of: Stage of each unit.
        relief: Recomputation and offload of activations; ``None``: those of ``program``.
    """
    setting = problem.setting
    microbatch = Microbatch(
        trace=program.trace,
        work=program.work,
        stage_of=stage_of,
        num_stages=setting.num_stages,
        speeds=program.stage_speeds,
        gradients=problem.gradients if program.begins_empty else {},
    )

    def simulate_flow(flow: Flow) -> Plan:
        return simulate(flow, setting.num_microbatches, policy, program.link, split_overhead=program.split_overhead)

    room: list[int | None] = []
    for stage, held in enumerate(problem.held(stage_of)):
        limit = setting.limit(stage)
        room.append(None if limit is None else limit - held.total)
    if relief is None:
        found = relieve(program.relief, microbatch, room, simulate_flow, program.calls)
    else:
        found = relieve(relief, microbatch, room, simulate_flow)
    return Score(found.plan.makespan, found.peaks, found.activation_policies)


def _in_flight(policy: Policy, stage: int, num_stages: int, num_microbatches: int) -> InFlight:
    """Bounds on the microbatches in flight on ``stage`` under ``policy``."""
    after, all_of_them = num_stages - 1 - stage, num_microbatches
    asked = policy.active_microbatches or all_of_them
    match policy.name:
        case "1f1b" if policy.num_chunks == 1:
            exactly = min(after + 1, asked, all_of_them)
            return InFlight(Promise(), Promise(exactly, exactly), exactly)
        case "1f1b":
            chunks = 2 * after + (policy.num_chunks - 1) * num_stages + 1
            return InFlight(likely=min(-(-chunks // policy.num_chunks), asked, all_of_them))
        case "interleaved":
            most = policy.most_active(num_stages)
            # A backward takes twice as long as a forward: until the first one returns, three forwards per stage fit.
            return InFlight(Promise(1, most), Promise(1, most), min(most, 3 * after + 1, all_of_them))
        case "zb-h1" | "zb-h2":
            most = min(num_stages if policy.name == "zb-h1" else 2 * num_stages - 1, asked)
            return InFlight(Promise(), Promise(1, most), min(most, all_of_them))
        case "zb-v":
            return InFlight(likely=min(num_stages, asked, all_of_them))
        case "simple":  # all forwards come first
            return InFlight(likely=all_of_them)


def _guesses(problem: PartitionProblem) -> list[dict[str, int]]:
    """Starting points for the solver: partitions of SageMaker's algorithm at several memory weights."""
    tree, setting = module_tree(problem.units), problem.setting
    if tree.num_leaves < setting.num_stages:
        return []
    names = [unit.name for unit in problem.units]
    weights = dict.fromkeys((0.2, 0.8, setting.memory_weight))
    return [in_execution_order(tree_partition(tree, setting.num_stages, weight), names) for weight in weights]


def _partition(
    program: PlanningInput,
    problem: PartitionProblem,
    stage_of: Mapping[str, int],
    score: Score,
    policy: Policy,
    lower_bound: float,
) -> Partition:
    return Partition.of(
        problem,
        stage_of,
        score,
        _reliefs(program, problem, policy, stage_of, score.activation_policies) if score.activation_policies else None,
        schedule=policy.name,
        chunks_per_stage=policy.num_chunks,
        active_microbatches=policy.active_microbatches,
        lower_bound=lower_bound,
    )


def _reliefs(
    program: PlanningInput,
    problem: PartitionProblem,
    policy: Policy,
    stage_of: Mapping[str, int],
    activation_policies: ActivationPolicies,
) -> StageActivations:
    """Bytes saved and seconds added by ``activation_policies``, per unit."""
    trace, work = program.relief.treated(program.trace, program.work, activation_policies, stage_of)
    of_units = {
        name: UnitActivations(treatment=activation_policy) for name, activation_policy in activation_policies.items()
    }
    for position, (before, after) in enumerate(zip(program.trace.events, trace.events, strict=True)):
        if before.kind == "unit" and before.name in of_units:
            seconds = sum(work[position]) - sum(program.work[position])
            spared = before.saved_bytes - after.saved_bytes
            of_units[before.name] = of_units[before.name].plus(spared, after.offloaded_bytes, seconds)
    all_kept = simulated(program, problem, policy, stage_of, ActivationPlan(machine=program.relief.machine))
    return StageActivations(of_units, tuple(peak.activations for peak in all_kept.peaks))
