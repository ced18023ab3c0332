"""What the user is shown once: the mesh, and the partition with its reasons."""

import io

from rich.console import Console

from smp_strategy.explain.text import WIDTH, stage_table, summary
from smp_strategy.mesh_shape import MeshShape
from smp_strategy.partitioner.partition import Partition

__all__ = ["render_layout"]


def render_layout(shape: MeshShape, partition: Partition, *, shards_state: bool = False) -> str:
    """The mesh, what was decided, and the stages as plain text.

    Args:
        shape: the mesh.
        partition: what was decided.
        shards_state: whether replicas shall share the state of the optimizers.
    """
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True)
    sharding = []
    if shards_state and shape.dp == 1:
        sharding = ["`shard_optimizer_state` changes nothing: there is one replica only."]
    elif shards_state and shape.dp_shard == 1:
        sharding = [f"The state of the optimizers is dealt out over {shape.dp} replicas, whole parameters to each."]
    if shape.dp_shard > 1:
        sharding.append(
            f"Each unit is spread over {shape.dp_shard} ranks, with its gradients and the state of its optimizer."
        )
    if shards_state and 1 < shape.dp_shard < shape.dp:
        sharding.append(
            f"The {shape.dp // shape.dp_shard} replicas of a shard group deal the state for its shards out, and pass "
            "on what they have updated."
        )
    for line in (shape.draw(), *summary(partition), *sharding):
        console.print(line, highlight=False)
    console.print(stage_table(partition))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
