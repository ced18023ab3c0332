"""Plain text of an explanation: summary, table of stages, tree of the model, and the schedule."""

from smp_strategy.config.sizes import show_bytes, show_count, show_seconds
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.module_tree import abbreviate, rows_of, tree_of
from smp_strategy.reports.explain.text_activations import RELIEF_CAPTION, RELIEF_COLUMNS, relief_lines, relief_rows
from smp_strategy.reports.table import ReportTable, Unwrapped, render_text

__all__ = ["relief_table", "sends_on", "stage_table", "summary", "text", "timetable", "waiting"]

# Actions per stage that are shown of a schedule.
MOST_ACTIONS = 40
# Overlap of steps from which on it is mentioned, as a share of a step.
LEAST_OVERLAP = 0.005


def text(partition: Partition, plan: Plan | None) -> str:
    """Text of the whole explanation."""
    parts: list[str | ReportTable] = [*summary(partition), "", stage_table(partition), "", _tree_table(partition)]
    if partition.activation_policies:
        parts += ["", relief_table(partition)]
    if plan is not None:
        parts.append(Unwrapped("\n" + timetable(plan)))
    return render_text(parts)


def summary(partition: Partition) -> list[str]:
    """Decision, quality and bottleneck, a line each; a single stage has only its time."""
    chunks = f" in {partition.num_chunks} chunks" if partition.num_chunks > partition.num_stages else ""
    units = show_count(len(partition.units), "unit")
    microbatches = show_count(partition.num_microbatches, "microbatch", "microbatches")
    if partition.num_stages == 1:
        return [
            f"{units} on one stage, {microbatches}",
            f"The work of a step takes {show_seconds(partition.step_seconds)} (simulated).",
            *relief_lines(partition),
        ]
    return [
        f"{units} on {partition.num_stages} stages{chunks}, schedule {partition.schedule} with {microbatches}",
        f"A step takes {show_seconds(partition.step_seconds)} (simulated); the stages wait {partition.bubble:.1%} of "
        f"it, their work is balanced to {partition.balance:.1%}.",
        f"Limited by the {partition.limited_by}. {_certificate(partition)}",
        *relief_lines(partition),
    ]


def _certificate(partition: Partition) -> str:
    """Sentence about the optimality of the partition."""
    if partition.lower_bound == 0.0:
        return "Nothing is known about better partitions."
    if partition.is_optimal:
        return "No contiguous partition is better: this is proven."
    return f"A better contiguous partition could save {partition.gap:.1%} at most."


def stage_table(partition: Partition) -> ReportTable:
    """Table of the stages: units, work, memory and traffic."""
    has_passing = any(stage.held.passing for stage in partition.stages)
    has_relief = bool(partition.activation_policies)
    longest = max((stage.seconds for stage in partition.stages), default=0.0) or 1.0
    rows = [
        [
            str(number),
            abbreviate([unit.name for unit in partition.units if unit.stage == number]),
            f"{show_seconds(stage.seconds)} {stage.seconds / longest:4.0%}",
            show_bytes(stage.fullest.states),
            *[show_bytes(stage.fullest.gathered)] * has_passing,
            show_bytes(stage.fullest.activations),
            show_bytes(stage.fullest.working),
            *[show_bytes(stage.all_kept_bytes or stage.activation_bytes)] * has_relief,
            show_bytes(stage.memory_bytes),
            "" if stage.memory_limit is None else show_bytes(stage.memory_limit),
            show_bytes(sends_on(partition, number)),
        ]
        for number, stage in enumerate(partition.stages)
    ]
    about_passing = "passing: gathered values, and gradients before they are reduced; " * has_passing
    about_all_kept = "all kept: activations, if units kept everything; " * has_relief
    passing, all_kept = ["passing"] * has_passing, ["all kept"] * has_relief
    return ReportTable(
        title="Stages",
        columns=[
            *("stage", "units", "time", "states", *passing, "activations", "working"),
            *(*all_kept, "memory", "limit", "sends on"),
        ],
        rows=rows,
        caption="time: work of a step, and its share of the busiest stage's; states: parameters, gradients and "
        f"optimizer state of the fullest rank; {about_passing}working: temporary results, and gradients on their way; "
        f"memory: at the fullest moment, of which the columns before tell; {about_all_kept}sends on: per microbatch",
    )


def sends_on(partition: Partition, stage: int) -> int:
    """Bytes of a microbatch that leave ``stage`` for the chunks after its own."""
    last = [here for here, after in zip(partition.units, partition.units[1:], strict=False) if here.chunk < after.chunk]
    return sum(nbytes for unit, nbytes in zip(last, partition.cut_bytes, strict=True) if unit.stage == stage)


def _tree_table(partition: Partition) -> ReportTable:
    total = sum(unit.seconds for unit in partition.units) or 1.0
    rows = [
        [
            "  " * row.depth + row.label,
            abbreviate([str(stage) for stage in row.node.stages]),
            show_seconds(row.node.seconds),
            f"{row.node.seconds / total:.1%}",
            show_bytes(row.node.held.parameter),
            show_bytes(row.node.held.total),
            show_bytes(row.node.activation_bytes),
            "" if row.node.children else show_bytes(row.node.units[-1].output_bytes),
        ]
        for row in rows_of(tree_of(partition.units))
    ]
    return ReportTable(
        title="Model",
        columns=("module", "stage", "time", "", "parameters", "states", "activations", "output"),
        rows=rows,
        caption="of one microbatch, forward and backward; states: parameters, gradients and optimizer state, all of it",
    )


def relief_table(partition: Partition) -> ReportTable:
    """Table of recomputed and offloaded activations."""
    return ReportTable(
        title="Kept for backward",
        columns=RELIEF_COLUMNS,
        rows=relief_rows(partition),
        caption=RELIEF_CAPTION,
        num_left=3,
    )


def timetable(plan: Plan) -> str:
    """Order of actions in a schedule, one line per stage."""
    lines = [f"Schedule of a training step ({waiting(plan)})"]
    for stage, actions in enumerate(plan.stages):
        shown = " ".join(map(str, actions[:MOST_ACTIONS])) + (" ..." if len(actions) > MOST_ACTIONS else "")
        lines.append(f"stage {stage}   {shown}")
    return "\n".join(lines)


def waiting(plan: Plan) -> str:
    """Idle share of a step, and the share that steps in a row save."""
    idle = f"idle {plan.bubble:.0%}"
    return f"{idle}; steps in a row overlap by {plan.overlap:.0%}" if plan.overlap >= LEAST_OVERLAP else idle
