"""From a module and its first microbatch to a partition: dry run, problem, solution, agreement of all ranks, file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_strategy.agreement import agree_on
from smp_strategy.config import SMPConfig
from smp_strategy.dry_run import DryRun, Surroundings, dry_run
from smp_strategy.partitioner.costs import Held
from smp_strategy.partitioner.partition import Partition
from smp_strategy.partitioner.problem import InFlight, Score, Setting
from smp_strategy.partitioner.reading import chain_of, problem_of
from smp_strategy.partitioner.solver import solve
from smp_strategy.pipeline.routing import route
from smp_strategy.pipeline.simulate import simulate
from smp_strategy.pipeline.turns import Step
from smp_strategy.timetables import policy_of
from smp_strategy.trace.events import Trace
from smp_strategy.trace.machine import Machine, modelled_work
from smp_strategy.trace.work import Work

__all__ = ["decide"]

# What an Adam-like optimizer keeps beside a parameter that is trained.
OPTIMIZER_MOMENTS = 2


def decide(
    config: SMPConfig,
    surroundings: Surroundings,
    num_stages: int,
    *,
    first: tuple[Step, Any, Callable[[Any], Tensor | None] | None],
    given: Mapping[str, int] | None = None,
) -> tuple[Partition, DryRun]:
    """Decide which unit goes to which stage; collective over all ranks.

    Args:
        config: all options.
        surroundings: the module and what its dry run runs on.
        num_stages: number of stages.
        first: the step, its first microbatch, and what picks the loss out of its result.
        given: stage of each unit, where that is decided already.

    Returns:
        The partition, and what the dry run has found out.
    """
    found = DryRun(None, ())
    if not config.skip_tracing:
        step, microbatch, loss_of = first
        found = dry_run(step, microbatch, loss_of, surroundings)
    parameters = held_of(surroundings)
    trace, work = chain_of(parameters)
    if found.trace is not None:
        trace = _as_training(found.trace)
        work = modelled_work(trace.events, Machine.nominal(surroundings.device.type))
    module = surroundings.module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    used = {id(tensor) for tensor in found.used_by_glue}
    partition, names = agree_on(
        best_partition(config, trace, work, parameters, num_stages, given),
        [name for name, tensor in tensors.items() if id(tensor) in used],
    )
    if config.partition_file and not config.load_partition and dist.get_rank() == 0:
        partition.save(config.partition_file)
    return partition, DryRun(found.trace, tuple(tensors[name] for name in names))


def held_of(surroundings: Surroundings) -> dict[str, dict[int, Held]]:
    """What the parameters of each unit take while they are trained, by unit in order of registration."""
    # Numbers that are the same on every rank tell which units share a parameter.
    numbers = {id(parameter): number for number, parameter in enumerate(surroundings.module.parameters())}
    return {
        unit.name: {
            numbers[id(parameter)]: Held(
                parameter.nbytes,
                parameter.nbytes * parameter.requires_grad,
                OPTIMIZER_MOMENTS * parameter.nbytes * parameter.requires_grad,
            )
            for parameter in unit.module.parameters()
        }
        for unit in surroundings.units
    }


def best_partition(
    config: SMPConfig,
    trace: Trace,
    work: Mapping[int, Work],
    parameters: Mapping[str, Mapping[int, Held]],
    num_stages: int,
    given: Mapping[str, int] | None = None,
) -> Partition:
    """The partition of least cost under the schedule that the options ask for, or the one that is ``given``."""
    num_microbatches = config.num_microbatches(num_stages)
    policy = policy_of(config)
    setting = Setting.plain(
        num_stages,
        num_microbatches=num_microbatches,
        memory_weight=config.resolved_memory_weight,
        in_flight=(InFlight(1, None),) * num_stages,
    )
    problem = problem_of(trace, work, parameters, setting)

    def evaluate(stage_of: Mapping[str, int]) -> Score:
        flow = route(trace, stage_of, num_stages, work)
        plan = simulate(flow, num_microbatches, policy)
        saved = [0] * num_stages
        for segment, nbytes in flow.saved_bytes.items():
            saved[segment.stage] += nbytes
        peaks = tuple(nbytes * plan.peak_microbatches(stage) for stage, nbytes in enumerate(saved))
        return Score(plan.makespan, peaks)

    if given is not None:
        return Partition.of(problem, given, evaluate(given), schedule=config.pipeline)
    solution = solve(problem, evaluate)
    return Partition.of(
        problem, solution.stage_of, solution.score, schedule=config.pipeline, lower_bound=solution.lower_bound
    )


def _as_training(trace: Trace) -> Trace:
    """A first step without a loss (validation, or one that runs its backward itself) stands for a step that trains."""
    last = [value.id for event in trace.events for value in event.outputs if value.requires_grad][-1:]
    return trace if trace.loss is not None or not last else replace(trace, loss=last[0])
