"""What the user is shown once: the mesh, the partition with its reasons, the timetable of the schedule."""

import io

from rich.console import Console
from rich.table import Table

from smp_strategy.mesh import MeshShape
from smp_strategy.partitioner.partition import Partition
from smp_strategy.pipeline.schedule import Plan

__all__ = ["render_layout", "render_schedule"]

WIDTH = 110
# A timetable of this many actions per stage still fits the width.
MOST_ACTIONS = 40


def render_layout(shape: MeshShape, partition: Partition) -> str:
    """The mesh and the partition as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True)
    console.print(shape.draw(), highlight=False)
    console.print(_partition_table(partition))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render_schedule(plan: Plan) -> str:
    """The timetable as plain text, one line per stage."""
    lines = [f"Schedule of a training step (idle {plan.bubble:.0%})"]
    for stage, actions in enumerate(plan.stages):
        shown = " ".join(map(str, actions[:MOST_ACTIONS])) + (" ..." if len(actions) > MOST_ACTIONS else "")
        lines.append(f"stage {stage}   {shown}")
    return "\n".join(lines)


def _partition_table(partition: Partition) -> Table:
    table = Table(title=f"Partition (balance {partition.balance:.0%})", title_justify="left")
    for name in ("stage", "units"):
        table.add_column(name)
    for name in ("parameters", "activations", "memory", "time", "sends on"):
        table.add_column(name, justify="right")
    total = sum(load.seconds for load in partition.stages) or 1.0
    for stage, load in enumerate(partition.stages):
        chunks = sorted({unit.chunk for unit in partition.units if unit.stage == stage})
        sent = [partition.cut_bytes[chunk] for chunk in chunks if chunk < len(partition.cut_bytes)]
        table.add_row(
            str(stage),
            _abbreviate([unit.name for unit in partition.units if unit.stage == stage]),
            _bytes(load.held.parameter),
            _bytes(load.activation_bytes),
            _bytes(load.memory_bytes),
            f"{load.seconds / total:.0%}",
            _bytes(sum(sent)) if sent else "",
        )
    proof = "proven to be the best" if partition.is_optimal else f"at most {partition.gap:.1%} from the best"
    table.caption = (
        f"activations and memory: at the peak; sends on: per microbatch; {proof}, limited by the {partition.limited_by}"
    )
    table.caption_justify = "left"
    return table


def _abbreviate(names: list[str]) -> str:
    """Runs of numbered siblings as one entry: ``h.0, h.1, h.2`` becomes ``h.0 .. h.2``."""
    groups: list[list[str]] = []
    for name in names:
        parent, _, last = name.rpartition(".")
        previous = groups[-1][-1].rpartition(".") if groups else ("", "", "")
        if last.isdigit() and previous[2].isdigit() and previous[0] == parent:
            groups[-1].append(name)
        else:
            groups.append([name])
    return ", ".join(group[0] if len(group) == 1 else f"{group[0]} .. {group[-1]}" for group in groups)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
