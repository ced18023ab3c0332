"""Partition decision in the first step: dry run, planning problem, solution, consensus of all ranks, file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from smp_strategy.activations.policy import ActivationPolicies
from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sizes import show_bytes, show_count
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.device_memory import memory_of_stages
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.dry_run import DryRun, DryRunInput, dry_run
from smp_strategy.engine.given_partition import GivenPartition
from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.job import Step
from smp_strategy.planning.activation_budget.allocate import ActivationPlan
from smp_strategy.planning.costs import Costs, find_costs
from smp_strategy.planning.memory.model import ShardingOf, holdings_of
from smp_strategy.planning.memory.sharded import with_turns
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.partition.problem import chain_of
from smp_strategy.planning.planner import PlanningInput, as_given, best_partition

__all__ = ["agree_on", "chosen_for_memory", "decide", "fitting_partition", "programs_of", "relief_of", "step_program"]


def decide(
    config: SMPConfig,
    inputs: DryRunInput,
    shape: MeshShape,
    *,
    first: tuple[Step, Any, Callable[[Any], Tensor | None] | None],
    given: GivenPartition | None = None,
    chosen: ActivationPolicies | None = None,
    num_parameters: Mapping[str, int],
    measuring: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Partition, DryRun, Costs]:
    """Decide the stage of each unit; collective over all ranks.

    Args:
        first: Step, its first microbatch, and the function that picks the loss out of its result.
        num_parameters: Number of parameters of each unit, before layers were split.
        measuring: Context in which single ranks run units by themselves.

    Returns:
        Partition, result of the dry run, and costs of calls.
    """
    found = DryRun(None, ())
    if not config.skip_tracing:
        step, microbatch, loss_of = first
        found = dry_run(step, microbatch, loss_of, inputs)
    with measuring():
        costs = find_costs(config, inputs.device, found.calls, found.trace, shape)
    costs = replace(costs, relief=relief_of(config, inputs, costs.machine, chosen or {}))
    limits = config.memory_limits(shape.pp) or memory_of_stages(inputs.device, shape)
    programs = programs_of(inputs, found, costs, shape, limits)
    module = inputs.module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    used = {id(tensor) for tensor in found.used_by_glue}
    partition, names = agree_on(
        fitting_partition(config, programs, shape.pp, given).sized(num_parameters),
        [name for name, tensor in tensors.items() if id(tensor) in used],
    )
    if config.partition_file and not config.load_partition and dist.get_rank() == 0:
        partition.save(config.partition_file)
    return partition, replace(found, used_by_glue=tuple(tensors[name] for name in names), calls=()), costs


def partition_of(config: SMPConfig, program: PlanningInput, num_stages: int, given: GivenPartition | None) -> Partition:
    """Best partition, or the given one with its costs.

    Raises:
        ConfigError: it exceeds the memory limits, or there are more chunks than units.
    """
    if given is None:
        return best_partition(config, program, num_stages)
    program = replace(program, relief=program.relief.taking(given.activation_policies))
    return as_given(config, program, num_stages, given.stage_of)


def programs_of(
    inputs: DryRunInput, found: DryRun, costs: Costs, shape: MeshShape, limits: Sequence[int | None]
) -> Callable[[SMPConfig], PlanningInput]:
    """Function from options to the planning problem under them. Arguments as for :func:`step_program`."""

    def program_under(config: SMPConfig) -> PlanningInput:
        fixed = {} if costs.relief is None else costs.relief.fixed
        relief = relief_of(config, inputs, costs.machine, fixed)
        return step_program(config, inputs, found, replace(costs, relief=relief), shape, limits)

    return program_under


def fitting_partition(
    config: SMPConfig,
    program_under: Callable[[SMPConfig], PlanningInput],
    num_stages: int,
    given: GivenPartition | None,
) -> Partition:
    """Partition within the memory limits, for shards under options that need less memory if nothing fits otherwise.

    Options that the user has set stay. First no unit is gathered ahead of its use (`sdp_max_live_parameters`), then
    units may recompute activations, as under `activation_checkpointing=auto`.

    Args:
        program_under: Planning problem under other options.
        given: Stage of each unit, if it is decided already.

    Raises:
        ConfigError: nothing fits, or there are more chunks than units.
    """
    program = program_under(config)
    try:
        return partition_of(config, program, num_stages, given)
    except ConfigError as error:
        if config.sharded_data_parallel_degree == 1 or not program.memory_limits:
            raise
        refusal = error
    ways, most_live, options = list[SMPConfig](), None, config
    if program.least_live and config.sdp_max_live_parameters == SMPConfig.sdp_max_live_parameters:
        most_live = program.least_live
        options = replace(options, sdp_max_live_parameters=most_live)
        ways.append(options)
    if _may_relieve(config) and not config.skip_tracing and None not in program.memory_limits:
        ways.append(replace(options, activation_checkpointing="auto"))
    for way in ways:
        try:
            return replace(partition_of(way, program_under(way), num_stages, given), most_live=most_live)
        except ConfigError as error:
            refusal = error
    raise refusal


def _may_relieve(config: SMPConfig) -> bool:
    """Whether the user has left recomputation at its default."""
    return config.activation_checkpointing in ("none", ())


def chosen_for_memory(config: SMPConfig, partition: Partition) -> str:
    """Options that :func:`fitting_partition` has chosen, and why, as a sentence; empty: none."""
    limits = [stage.memory_limit for stage in partition.stages if stage.memory_limit is not None]
    relieved = len(partition.activation_policies) if _may_relieve(config) else 0
    if partition.most_live is None and not (relieved and limits):
        return ""
    said = []
    if partition.most_live is not None:
        said.append(f"no unit is gathered ahead of its use (`sdp_max_live_parameters={partition.most_live}`)")
    if relieved:
        said.append(
            f"{relieved} of {show_count(len(partition.units), 'unit')} compute activations again "
            "(as under `activation_checkpointing=auto`)"
        )
    most = show_bytes(max(stage.memory_bytes for stage in partition.stages))
    return (
        f"To stay within the memory limit of {show_bytes(min(limits))} a rank, {' and '.join(said)}: {most} are "
        "predicted. Set these options to choose otherwise."
    )


def relief_of(config: SMPConfig, inputs: DryRunInput, machine: Machine, chosen: ActivationPolicies) -> ActivationPlan:
    """Activation plan: which units keep, recompute or offload activations (``chosen``: by options, or by hand), and for
    which of them the solver decides.
    """
    free: frozenset[str] = frozenset()
    if config.activation_checkpointing == "auto":
        free = frozenset(unit.name for unit in inputs.units if unit.name not in chosen)
    return ActivationPlan(
        machine=machine,
        fixed=chosen,
        free=free,
        may_offload=config.offload_activations,
        # The results of matrix products inside a compiled unit cannot be observed.
        may_keep_products=not config.compile,
        preserve_rng_state=config.preserve_rng_state,
        min_bytes=config.least_offloaded,
        horizon=config.activation_loading_horizon,
    )


def step_program(
    config: SMPConfig,
    inputs: DryRunInput,
    found: DryRun,
    costs: Costs,
    shape: MeshShape,
    limits: Sequence[int | None],
) -> PlanningInput:
    """Planning problem under memory ``limits`` of a rank of each stage, in bytes.

    Without a trace, units count as a chain in order of registration.
    """
    spreading = ShardingOf.of(config, shape, sends_copies=is_host(inputs.device))
    calls = [] if found.trace is None else [event.name for event in found.trace.events if event.kind == "unit"]
    mixed_precision = inputs.calls.mixed_precision
    holdings = holdings_of(
        inputs.module,
        inputs.units,
        spreading,
        optimizers=inputs.optimizers,
        use_dtypes={} if mixed_precision is None else mixed_precision.dtypes_in(inputs.module),
        used_by_glue=found.used_by_glue,
        calls=calls,
    )
    if config.activation_checkpointing == "auto" and None in limits:
        raise ConfigError(
            "`activation_checkpointing=auto` computes again what `memory_limit` makes necessary, but there is no limit "
            f"on a {inputs.device.type}. Set `memory_limit`, or name the units (`all`, or patterns)."
        )
    if found.trace is None:
        events, work = chain_of({name: held.parameter for name, held in holdings.whole.items()})
    else:
        events = with_turns(costs.with_bytes(_as_training(found.trace)), holdings.turns)
        work = costs.work(events.events)
    return PlanningInput(
        trace=events,
        work=work,
        parameters=holdings.by_unit,
        everywhere=holdings.everywhere,
        whole=holdings.whole,
        state_shards=spreading.state_shards,
        turns=holdings.turns,
        least_live=holdings.least_live,
        begins_empty=inputs.begins_empty,
        link=costs.machine.link,
        split_overhead=costs.split_overhead,
        memory_limits=tuple(limits),
        stage_speeds=costs.stage_speeds,
        relief=costs.relief or ActivationPlan(machine=costs.machine),
    )


def _as_training(trace: Trace) -> Trace:
    """``trace`` of a step without a loss (validation, or manual backward) with its last result as the loss."""
    last = [value.id for event in trace.events for value in event.outputs if value.requires_grad][-1:]
    return trace if trace.loss is not None or not last else replace(trace, loss=last[0])


def agree_on(partition: Partition, used_by_glue: Sequence[str]) -> tuple[Partition, list[str]]:
    """Agree on a single partition for all ranks; collective.

    Replicas read different batches. Their shapes, and values if a step depends on them, lead to different costs and
    paths. So all ranks take the partition of rank 0, and hold each tensor that code above the units uses on any rank.

    Raises:
        SMPError: the modules of the ranks have different units.
    """
    found = collectives.gather_objects((partition, list(used_by_glue)), "the decision about the partition")
    units = [sorted(theirs.stage_of) for theirs, _ in found]
    differing = [rank for rank, names in enumerate(units) if names != units[0]]
    if differing:
        name = min(set(units[0]) ^ set(units[differing[0]]))
        raise SMPError(
            f"Ranks {differing} have other units than rank 0: `{name}`, for example, is not on all of them. Build the "
            "same model on every rank."
        )
    return found[0][0], sorted({name for _, names in found for name in names})
