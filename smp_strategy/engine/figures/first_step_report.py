"""Report at the end of the first training step: mesh, stages, times, memory, and the change that would help most.

It has at most :data:`MOST_LINES` lines of :data:`MOST_COLUMNS` columns. Measured times are those of the first step,
which takes longer than later ones.
"""

import textwrap
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from smp_strategy.config.sizes import show_bytes, show_count, show_seconds
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.figures.startup_report import render_batch
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.module_tree import abbreviate

__all__ = ["MOST_COLUMNS", "MOST_LINES", "StageMeasurement", "best_change", "describe_first_step", "render_first_step"]

MOST_LINES: Final = 25
MOST_COLUMNS: Final = 100
# Stages in the table and in the timetable, of those that there are.
_MOST_STAGES: Final = 7
# Planning another layout takes time with the number of actions: microbatches times stages.
_MOST_ACTIONS: Final = 512
# Improvement of the idle share from which on a change is worth a line.
_LEAST_GAIN: Final = 0.01


class StageMeasurement(NamedTuple):
    """First step of a stage."""

    stage: int
    work: float
    """Seconds of the step in which the stage did not wait; 0: it was not measured."""
    seconds: float
    """Of the step."""
    memory: int | None
    """Most bytes on the accelerator so far; ``None``: on the processor nobody counts."""


def describe_first_step(parts: EngineParts) -> str:
    """Report of the first training step of this replica. Collective over its stages."""
    mesh, layout, recorded = parts.mesh, parts.layout, parts.recorded
    assert layout.partition is not None
    recording = None if recorded is None else recorded.recording
    memory = None if is_host(parts.device) else torch.accelerator.max_memory_allocated(parts.device)
    mine = StageMeasurement(
        mesh.stage,
        0.0 if recording is None else recording.seconds - recording.idle,
        0.0 if recording is None else recording.seconds,
        memory,
    )
    measured = [mine]
    if mesh.pp > 1:
        measured = sorted(collectives.gather_objects(mine, "the report of the first step", mesh.pp_group))
    numbers = [0] * mesh.pp
    for unit in layout.partition.units:
        numbers[unit.stage] += layout.num_parameters[unit.name]
    split = layout.split_report
    return render_first_step(
        mesh.shape,
        layout.partition,
        parts.num_samples,
        num_parameters=numbers,
        measured=measured,
        plan=None if recorded is None else recorded.plan,
        change=_change(parts, recorded.plan) if recorded is not None else "",
        split="" if split is None else str(split).partition("\n")[0],
    )


def _change(parts: EngineParts, plan: Plan) -> str:
    """The change that would lower the idle share most, in a sentence; empty: there is none."""
    partition, plans = parts.layout.partition, parts.layout.plans
    assert partition is not None
    number = len({action.microbatch for action in plan.stages[0]})
    if partition.num_stages == 1 or 2 * number * partition.num_stages > _MOST_ACTIONS:
        return ""
    enough = "" if parts.num_samples >= 2 * number else ", with batches of more samples"
    # Whole batches have a reason: they cannot be cut, samples are compared, or the user wants them so.
    found = {} if parts.config.microbatches == 1 else {f"`microbatches={2 * number}`{enough}": plans.bubble(2 * number)}
    if partition.schedule != "zb-h1" and partition.chunks_per_stage == 1:
        found["`pipeline=zb-h1`"] = plans.bubble(number, "zb-h1")
    return best_change(plan.bubble, {name: idle for name, idle in found.items() if idle is not None})


def best_change(idle: float, found: dict[str, float]) -> str:
    """Sentence about the change with the lowest idle share; empty if none is better than ``idle``."""
    name = min(found, key=lambda each: found[each], default="")
    if not name or idle - found[name] < _LEAST_GAIN:
        return ""
    return f"What would help most: {name}: idle {idle:.0%} -> {found[name]:.0%} (predicted)."


def render_first_step(
    shape: MeshShape,
    partition: Partition,
    num_samples: int,
    *,
    num_parameters: Sequence[int],
    measured: Sequence[StageMeasurement],
    plan: Plan | None,
    change: str = "",
    split: str = "",
) -> str:
    """Report as plain text.

    Args:
        num_samples: Samples in the batch of a replica.
        plan: Schedule of the step; ``None``: it had none.
        change: Sentence about the change that would help most; empty: none is known.
        split: Sentence about split layers; empty: there are none.
    """
    lines = [f"Process mesh: {shape}", *shape.notes(), *_stages(shape, partition, num_parameters, measured)]
    lines += [split] if split else []
    lines += _times(partition, measured, plan)
    if partition.num_stages > 1:
        lines.append(f"Limited by the {partition.limited_by}.")
    lines += [change] if change else []
    lines += [render_batch(num_samples, shape)] if shape.world_size > 1 else []
    lines += ["More: `smp_report=full`; less: `smp_report=quiet`."]
    return "\n".join(_fitted(lines))


def _fitted(lines: Sequence[str]) -> list[str]:
    """``lines`` within the columns: timetables are cut, sentences are wrapped."""
    found: list[str] = []
    for line in lines:
        if line.startswith(("stage ", *"0123456789")):
            found.append(line if len(line) <= MOST_COLUMNS else f"{line[: MOST_COLUMNS - 4]} ...")
        else:
            found += textwrap.wrap(line, MOST_COLUMNS) or [""]
    return found


def _shown(num_stages: int) -> list[int]:
    """Stages that have a line: all, or the first and the last ones."""
    if num_stages <= _MOST_STAGES:
        return list(range(num_stages))
    return [*range(_MOST_STAGES - 2), num_stages - 1]


def _stages(
    shape: MeshShape, partition: Partition, num_parameters: Sequence[int], measured: Sequence[StageMeasurement]
) -> list[str]:
    head = ("stage", "ranks", "units", "parameters", "memory", "work of a step")
    rows = [head]
    for stage in _shown(partition.num_stages):
        load, found = partition.stages[stage], measured[stage]
        ranks = sorted(shape.rank_at(replica, stage, part) for replica in range(shape.dp) for part in range(shape.tp))
        memory = show_bytes(load.memory_bytes)
        work = show_seconds(load.seconds)
        rows.append(
            (
                str(stage),
                _cut(", ".join(map(str, ranks)), 12),
                abbreviate([unit.name for unit in partition.units if unit.stage == stage]),
                _short(num_parameters[stage]),
                memory if found.memory is None else f"{memory}, {show_bytes(found.memory)}",
                f"{work}, {show_seconds(found.work)}" if found.work else work,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    gap, names = "  ", head.index("units")
    room = MOST_COLUMNS - sum(widths) + widths[names] - len(gap) * (len(head) - 1)
    widths[names] = min(widths[names], room)
    lines = [
        gap.join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if len(lines) <= partition.num_stages:
        left_out = partition.num_stages - _MOST_STAGES + 1
        lines.insert(-1, f"...    {show_count(left_out, 'more stage')}")
    is_measured = any(each.work for each in measured)
    kinds = "Predicted, then measured in this first step" if is_measured else "Predicted"
    return [*lines, f"{kinds}. Memory: of the fullest rank, at its peak."]


def _times(partition: Partition, measured: Sequence[StageMeasurement], plan: Plan | None) -> list[str]:
    """Time of a step, and its timetable."""
    predicted = partition.step_seconds if plan is None else plan.makespan
    seconds = max(each.seconds for each in measured)
    told = f", {show_seconds(seconds)} measured" if seconds else ""
    lines = [f"A step takes {show_seconds(predicted)} predicted{told} (forward and backward)."]
    if plan is None or partition.num_stages == 1:
        return lines
    idle = f"idle {plan.bubble:.0%} predicted"
    if seconds:
        idle += f", {1 - sum(each.work for each in measured) / (seconds * len(measured)):.0%} measured"
    lines.append(f"Schedule of a training step ({idle}): {partition.schedule}")
    shown = _shown(partition.num_stages)
    return [*lines, *(f"stage {stage}   {' '.join(map(str, plan.stages[stage]))}" for stage in shown)]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _short(count: int) -> str:
    """``count`` with a unit: 124 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
