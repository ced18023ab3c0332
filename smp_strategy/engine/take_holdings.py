"""Holdings of a rank, taken from the full module: values of other ranks are freed, shards are made unit by unit."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.flat_unit import ShardPolicy
from smp_strategy.data_parallel.gather_schedule import GatherPolicy
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.data_parallel.zero1 import ZeroOptimizer
from smp_strategy.distributed.collectives.interface import collectives_of
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.model.deferred_tensor import ReadRun
from smp_strategy.model.ownership import Ownership
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.precision.dtypes import compute_dtype, dtypes_in_use, reduce_dtype

__all__ = ["take_holdings"]


def take_holdings(
    module: nn.Module,
    ownership: Ownership,
    mesh: ProcessMesh,
    config: SMPConfig,
    delayed: DelayedModule,
    parts: ParameterParts,
    copies: Sequence[nn.Module],
) -> Holdings:
    """Free the values that this rank does not hold, and shard the parameters of its stage. Collective. Arguments as for
    :class:`~smp_strategy.engine.local_model.LocalModel`.
    """
    is_sharded = mesh.shard_group is not None
    # Sharded parameters get their values later, unit by unit: see `_with_values`.
    spread = ownership.parameters_by_units() if is_sharded else {}
    delayed.settle(
        lambda tensor: mesh.stage in ownership.holders(tensor),
        later={parameter for members in spread.values() for _, parameter in members},
        copies=copies,
    )
    ownership.release(mesh.stage, copies)
    return Holdings(
        module=module,
        ownership=ownership,
        mesh=mesh,
        zero=ZeroOptimizer(ownership, mesh, is_on=config.shard_optimizer_state and not is_sharded),
        sharded=_shard(module, ownership, mesh, config, delayed) if is_sharded else ShardedModule.none(),
        parts=parts,
    )


def _shard(
    module: nn.Module, ownership: Ownership, mesh: ProcessMesh, config: SMPConfig, delayed: DelayedModule
) -> ShardedModule:
    """Shard the parameters of this rank's stage over the shard group; each unit gets values just before. Collective."""
    assert mesh.shard_group is not None
    device = delayed.device
    is_on_nodes = mesh.shape.nodes_of_shard_group > 1
    shards = collectives_of(
        mesh.shard_group,
        device,
        len(mesh.shape.hops(mesh.rank)[0]) if is_on_nodes else None,
        gathers_in_hops=config.sdp_hierarchical_allgather,
        most_reduced=config.sdp_reduce_bucket_size,
        on_one_node=not is_on_nodes,
    )
    parameters, across = {}, {}
    runs: dict[nn.Parameter, ReadRun] = {}
    for users, members in ownership.parameters_by_units().items():
        stages = frozenset(ownership.stage_of[user] for user in users)
        group = mesh.group_of(stages) if len(stages) > 1 else None
        if mesh.stage in stages:
            runs.update(delayed.runs(parameter for _, parameter in members))
            parameters[users] = _with_values(members, delayed)
        if group is not None:
            across[users] = (group, mesh.stage == min(stages))
    has_replicas = mesh.dp > mesh.shape.dp_shard
    is_flat = config.ddp_reduction == "flat"
    per_node = None if is_flat else mesh.shape.ranks_per_node(mesh.rank, "dp_replicate")
    units = ShardedModule(
        parameters,
        shards,
        collectives_of(mesh.replicate_group, device, per_node) if has_replicas else None,
        device,
        across=across,
        timing=GatherPolicy(
            gathers_once=config.gathers_once(mesh.pp),
            reduces_early=mesh.pp == 1,
            most_live=config.sdp_max_live_parameters,
        ),
        deals_out=has_replicas and config.shard_optimizer_state,
        keeping=_keeping(module, config),
    )
    units.group = mesh.shard_group
    with torch.no_grad():
        for parameter, read in runs.items():
            buffer, number = units.place_of(parameter)
            for start, memory in buffer.runs_to_fill(number):
                memory.copy_(read(start, start + len(memory)))
    return units


def _keeping(module: nn.Module, config: SMPConfig) -> ShardPolicy:
    named, seen = dict(module.named_parameters()), dtypes_in_use(module, compute_dtype(config))
    return ShardPolicy(
        persistence_threshold=config.sdp_param_persistence_threshold,
        dtypes={named[name]: dtype for name, dtype in seen.items()},
        gradient_dtype=config.gradient_dtype,
        reduce_dtype=reduce_dtype(config),
    )


def _with_values(
    members: Sequence[tuple[str, nn.Parameter]], delayed: DelayedModule
) -> Iterator[tuple[str, nn.Parameter]]:
    """``members``, materialised when the iteration begins and not before: each unit is sharded before the next one."""
    delayed.materialise(parameter for _, parameter in members)
    yield from members
