"""From a module and its first microbatch to a partition: dry run, problem, solution, agreement of all ranks, file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_strategy.activations.policy import Treatments
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.device_memory import memory_of_stages
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.consensus import agree_on
from smp_strategy.engine.dry_run import DryRun, DryRunInput, dry_run
from smp_strategy.engine.given_partition import GivenPartition
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.job import Step
from smp_strategy.planning.activation_budget.allocate import ActivationPlan
from smp_strategy.planning.costs import Costs, find_costs
from smp_strategy.planning.memory.model import ShardingOf, holdings_of
from smp_strategy.planning.partition.from_trace import chain_of
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.planner import PlanningInput, as_given, best_partition

__all__ = ["decide", "partition_of", "program_of", "relief_of"]


def decide(
    config: SMPConfig,
    surroundings: DryRunInput,
    shape: MeshShape,
    *,
    first: tuple[Step, Any, Callable[[Any], Tensor | None] | None],
    given: GivenPartition | None = None,
    chosen: Treatments | None = None,
    num_parameters: Mapping[str, int],
    measuring: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Partition, DryRun, Costs]:
    """Decide which unit goes to which stage; collective over all ranks.

    Args:
        config: all options.
        surroundings: the module and what its dry run runs on.
        shape: how many stages there are, and on which ranks.
        first: the step, its first microbatch, and what picks the loss out of its result.
        given: stage of each unit, where that is decided already.
        chosen: what the options say that units do about what they would keep for backward.
        num_parameters: of each unit, before layers were split.
        measuring: entered while single ranks run units by themselves.

    Returns:
        The partition, what the dry run has found out, and what calls cost.
    """
    found = DryRun(None, ())
    if not config.skip_tracing:
        step, microbatch, loss_of = first
        found = dry_run(step, microbatch, loss_of, surroundings)
    with measuring():
        costs = find_costs(config, surroundings.device, found.calls, found.trace, shape)
    costs = replace(costs, relief=relief_of(config, surroundings, costs.machine, chosen or {}))
    program = program_of(config, surroundings, found, costs, shape, _room_of_stages(config, surroundings, shape))
    module = surroundings.module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    used = {id(tensor) for tensor in found.used_by_glue}
    partition, names = agree_on(
        partition_of(config, program, shape.pp, given).sized(num_parameters),
        [name for name, tensor in tensors.items() if id(tensor) in used],
    )
    if config.partition_file and not config.load_partition and dist.get_rank() == 0:
        partition.save(config.partition_file)
    return partition, DryRun(found.trace, tuple(tensors[name] for name in names)), costs


def partition_of(config: SMPConfig, program: PlanningInput, num_stages: int, given: GivenPartition | None) -> Partition:
    """The best partition, or what the given one costs.

    Raises:
        ConfigError: it does not fit the limits of memory, or there are more chunks than units.
    """
    if given is None:
        return best_partition(config, program, num_stages)
    program = replace(program, relief=program.relief.taking(given.treatments))
    return as_given(config, program, num_stages, given.stage_of)


def relief_of(config: SMPConfig, surroundings: DryRunInput, machine: Machine, chosen: Treatments) -> ActivationPlan:
    """What becomes of what units would keep for backward.

    Args:
        config: all options.
        surroundings: the units.
        machine: models what is done again.
        chosen: what the options, and the user by hand, say of units.
    """
    free: frozenset[str] = frozenset()
    if config.activation_checkpointing == "auto":
        free = frozenset(unit.name for unit in surroundings.units if unit.name not in chosen)
    return ActivationPlan(
        machine=machine,
        fixed=chosen,
        free=free,
        may_offload=config.offload_activations,
        # A compiled unit shows nobody the results of its products.
        may_keep_products=not config.compile,
        preserve_rng_state=config.preserve_rng_state,
        min_bytes=config.least_offloaded,
        horizon=config.activation_loading_horizon,
    )


def _room_of_stages(config: SMPConfig, surroundings: DryRunInput, shape: MeshShape) -> tuple[int | None, ...]:
    """Bytes that a rank of each stage may fill: what the user says, or what there is."""
    return config.memory_limits(shape.pp) or memory_of_stages(surroundings.device, shape)


def program_of(
    config: SMPConfig,
    surroundings: DryRunInput,
    found: DryRun,
    costs: Costs,
    shape: MeshShape,
    limits: Sequence[int | None],
) -> PlanningInput:
    """What is to be planned; without a trace the units are taken for a chain in order of registration.

    Args:
        config: all options.
        surroundings: the module and its optimizers.
        found: by a dry run.
        costs: of the calls in it.
        shape: how many ranks share what a stage holds, and how many stages there are.
        limits: bytes that a rank of each stage may fill; ``None``: any number.
    """
    spreading = ShardingOf.of(config, shape)
    calls = [] if found.trace is None else [event.name for event in found.trace.events if event.kind == "unit"]
    halves = surroundings.calls.halves
    holdings = holdings_of(
        surroundings.module,
        surroundings.units,
        spreading,
        optimizers=surroundings.optimizers,
        use_dtypes={} if halves is None else halves.dtypes_in(surroundings.module),
        used_by_glue=found.used_by_glue,
        calls=calls,
    )
    if config.activation_checkpointing == "auto" and None in limits:
        raise ConfigError(
            "`activation_checkpointing=auto` computes again what `memory_limit` makes necessary, but there is no limit "
            f"on a {surroundings.device.type}. Set `memory_limit`, or name the units (`all`, or patterns)."
        )
    if found.trace is None:
        events, work = chain_of({name: held.parameter for name, held in holdings.whole.items()})
    else:
        events = costs.with_bytes(_as_training(found.trace))
        work = costs.work(events.events)
    return PlanningInput(
        trace=events,
        work=work,
        parameters=holdings.by_unit,
        everywhere=holdings.everywhere,
        whole=holdings.whole,
        state_shards=spreading.state_shards,
        link=costs.machine.link,
        split_overhead=costs.split_overhead,
        memory_limits=tuple(limits),
        stage_speeds=costs.stage_speeds,
        relief=costs.relief or ActivationPlan(machine=costs.machine),
    )


def _as_training(trace: Trace) -> Trace:
    """A first step without a loss (validation, or one that runs its backward itself) stands for a step that trains."""
    last = [value.id for event in trace.events for value in event.outputs if value.requires_grad][-1:]
    return trace if trace.loss is not None or not last else replace(trace, loss=last[0])
