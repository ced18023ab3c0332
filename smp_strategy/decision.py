"""From a module and its first microbatch to a partition: dry run, problem, solution, agreement of all ranks, file."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_strategy.agreement import agree_on
from smp_strategy.config import SMPConfig
from smp_strategy.dry_run import DryRun, Surroundings, dry_run
from smp_strategy.partition.partition import Partition
from smp_strategy.partition.problem import problem_of
from smp_strategy.partition.solver import solve
from smp_strategy.pipeline.turns import Step
from smp_strategy.trace.events import Trace

__all__ = ["decide"]


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
    module, units = surroundings.module, surroundings.units
    found = DryRun(None, ())
    if not config.skip_tracing:
        step, microbatch, loss_of = first
        found = dry_run(step, microbatch, loss_of, surroundings)
    # Numbers that are the same on every rank tell which units share a parameter.
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    parameters = {
        unit.name: {numbers[id(parameter)]: parameter.nbytes for parameter in unit.module.parameters()}
        for unit in units
    }
    problem = problem_of(
        found.trace or Trace([]), parameters, num_stages=num_stages, memory_weight=config.resolved_memory_weight
    )
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    used = {id(tensor) for tensor in found.used_by_glue}
    partition = Partition.of(problem, solve(problem)) if given is None else Partition.by_hand(problem, given)
    partition, names = agree_on(partition, [name for name, tensor in tensors.items() if id(tensor) in used])
    if config.partition_file and not config.load_partition and dist.get_rank() == 0:
        partition.save(config.partition_file)
    return partition, DryRun(found.trace, tuple(tensors[name] for name in names))
