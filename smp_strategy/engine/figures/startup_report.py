"""Startup report, shown once: the mesh, the partition with its reasons, samples per step, why stages do not overlap."""

from collections.abc import Sequence

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.text import stage_table, summary
from smp_strategy.reports.table import Unwrapped, render_text
from smp_strategy.tensor_parallel.plan.plan import SplitReport

__all__ = ["render_batch", "render_layout", "render_order"]


def render_layout(shape: MeshShape, partition: Partition, config: SMPConfig, split: SplitReport | None = None) -> str:
    """Mesh, decisions and stages as plain text."""
    lines = (shape.draw(), *summary(partition), *_sharding(shape, config, bool(partition.units)))
    splits = [] if split is None else [Unwrapped(split)]
    return render_text([*lines, stage_table(partition), *splits])


def render_batch(num_samples: int, shape: MeshShape) -> str:
    """Number of samples in a training step, in a sentence."""
    replicas = f"{shape.dp} replicas read {num_samples} each" if shape.dp > 1 else "one replica reads them all"
    return f"A training step sees {num_samples * shape.dp} samples: {replicas}. Accumulated batches come on top."


def render_order(kind: str, names: Sequence[str]) -> str:
    """Reason why microbatches do not take turns, in a sentence: in the attributes or variables ``names`` one leaves
    state for the next.
    """
    where = f"`{'`, `'.join(names[:3])}`" if names else "attributes or variables"
    return (
        f"Microbatches of a step ({kind}) run one after the other, and stages do not overlap: each begins with what "
        f"the one before it has left in {where}. Change that once per batch (in `on_train_batch_end`, say), and stages "
        "will overlap."
    )


def _sharding(shape: MeshShape, config: SMPConfig, has_units: bool) -> list[str]:
    """Sentences on the sharding of parameters, gradients and optimizer state."""
    found = []
    if config.shard_optimizer_state and shape.dp == shape.dp_shard:
        those = "replica only" if shape.dp == 1 else "shard group, whose ranks have their parts of the state already"
        found.append(f"`shard_optimizer_state` changes nothing: there is one {those}.")
    elif config.shard_optimizer_state and shape.dp_shard == 1:
        found.append(f"The state of the optimizers is dealt out over {shape.dp} replicas, whole parameters to each.")
    if shape.dp_shard > 1 and not has_units:
        found.append(
            f"`sharded_data_parallel_degree` ({shape.dp_shard}) spreads nothing: the model cannot be cut into units, "
            "and the parameters of its outermost module are whole on every rank."
        )
    elif shape.dp_shard > 1:
        when = "once per batch" if config.gathers_once(shape.pp) else "for each use"
        groups = shape.dp // shape.dp_shard
        copies = f"; {groups} groups of ranks have one copy each" if groups > 1 else ""
        if config.shard_optimizer_state and groups > 1:
            copies += ", and deal the state for it out among each other"
        found.append(
            f"Each unit is spread over {shape.dp_shard} ranks, with its gradients and the state of its optimizer, and "
            f"gathered {when} (which takes time that is not simulated){copies}."
        )
    return found
