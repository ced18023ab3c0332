"""Degrees of the mesh axes; the default of ``pipeline_parallel_degree`` is as many stages as ranks and units allow.

If parameters or optimizer state are sharded, or layers split, the default is a single stage: the ranks are needed for
that, and a pipeline beside it must be requested by its degree. SageMaker's library has 1 as its default as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.degree_check import check_degree
from smp_strategy.config.sizes import show_count
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.distributed.topology import find_node_size
from smp_strategy.engine.given_partition import choose_placed_units
from smp_strategy.errors import ConfigError
from smp_strategy.planning.partition.user_partition import some

__all__ = ["check_degrees", "choose_shape", "shape_with"]


def check_degrees(config: SMPConfig, world_size: int, module: nn.Module | None) -> None:
    """Refuse degrees that do not fit the ranks, or the units of ``module`` if there is one already.

    If ``pipeline_parallel_degree`` is left to the library, some number of stages fits.

    Raises:
        ConfigError: the degrees do not fit, or other options do not fit the degrees.
    """
    degree = config.pipeline_parallel_degree
    names: list[str] | None = None
    if degree is not None:
        config.check(degree)
    if degree is not None and module is not None:
        names = [unit.name for unit in choose_placed_units(config, module, degree)]
    check_degree(
        degree or 1,
        world_size,
        names,
        dp_shard=config.sharded_data_parallel_degree,
        tp=config.tensor_parallel_degree,
    )
    if degree is not None and names:
        _check_chunks(degree, config.chunks_per_stage or 1, names)


def _check_chunks(degree: int, chunks: int, names: Sequence[str]) -> None:
    if chunks > 1 and degree * chunks > len(names):
        raise ConfigError(
            f"`pipeline_parallel_degree` ({degree}) times `virtual_pipeline_degree` ({chunks}) must not be larger than "
            f"the number of units that the model can be cut into ({len(names)}: {some(names)}). Choose smaller degrees."
        )


def choose_shape(config: SMPConfig, module: nn.Module, report: Callable[[str], None]) -> MeshShape:
    """Degrees of all axes for the ranks of this run; the choice, or a warning that a pipeline is not worthwhile, is
    reported.

    Raises:
        ConfigError: the degrees do not fit the number of ranks or of units, or other options do not fit the degrees.
    """
    world_size, dp_shard = dist.get_world_size(), config.sharded_data_parallel_degree
    tp = config.tensor_parallel_degree
    degree = config.pipeline_parallel_degree
    if degree is None and (config.shard_optimizer_state or dp_shard > 1 or tp > 1):
        degree = 1
    elif degree is None:
        num_units = len(choose_placed_units(config, module, world_size))
        degree = max((d for d in range(1, num_units + 1) if world_size % d == 0), default=1)
        report(
            f"No `pipeline_parallel_degree` is given: {show_count(degree, 'stage')} on "
            f"{show_count(world_size, 'rank')} ({show_count(num_units, 'unit')}), "
            f"{show_count(config.num_microbatches(degree), 'microbatch', 'microbatches')} where the batch has as many "
            "samples."
        )
    elif degree > 1 and config.num_microbatches(degree) == 1:
        report(
            f"`microbatches` is 1: the {degree} stages will work one after the other, never at once. "
            f"Set it to about {4 * degree}, unless the loss compares samples of its batch, or a norm needs all of them."
        )
    check_degrees(replace(config, pipeline_parallel_degree=degree), world_size, module)
    return shape_with(config, degree)


def shape_with(config: SMPConfig, degree: int) -> MeshShape:
    """Degrees of all axes with ``degree`` stages, for the ranks of this run. Collective.

    Raises:
        ConfigError: the degrees do not fit the number of ranks, or other options do not fit the degrees.
    """
    config.check(degree)
    dp_shard = config.sharded_data_parallel_degree
    is_hierarchical = config.ddp_reduction == "hierarchical"
    needed_by = "ddp_reduction=hierarchical" if is_hierarchical else None
    shape = MeshShape.of_world(
        dist.get_world_size(),
        pp=degree,
        dp_shard=dp_shard,
        tp=config.tensor_parallel_degree,
        placement=config.placement_strategy,
        node_size=find_node_size(f"sharded_data_parallel_degree={dp_shard}" if dp_shard > 1 else needed_by),
    )
    if is_hierarchical and shape.has_uneven_replicas:
        raise ConfigError(
            f"`ddp_reduction=hierarchical` needs as many replicas of a stage on each node as on every other, but they "
            f"are uneven. Choose other degrees, or leave the option out.\n{shape.draw()}"
        )
    return shape
