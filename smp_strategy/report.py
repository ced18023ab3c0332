"""What the user is shown once: the mesh, and the partition with its reasons."""

import io

from rich.console import Console

from smp_strategy.explain.text import WIDTH, stage_table, summary
from smp_strategy.mesh_shape import MeshShape
from smp_strategy.partitioner.partition import Partition

__all__ = ["render_layout"]


def render_layout(shape: MeshShape, partition: Partition) -> str:
    """The mesh, what was decided, and the stages as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True)
    for line in (shape.draw(), *summary(partition)):
        console.print(line, highlight=False)
    console.print(stage_table(partition))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
