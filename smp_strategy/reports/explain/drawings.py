"""SVG drawings of an explanation: model as a strip with its cuts, time and memory of stages, schedule."""

from html import escape

from smp_strategy.config.sizes import show_bytes, show_seconds
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.partition.partition import Partition, StageLoad
from smp_strategy.reports.explain.text_activations import name_of
from smp_strategy.reports.html import element, svg

__all__ = ["LABEL", "WIDTH", "block", "colour", "loads", "strip", "timetable"]

WIDTH = 960.0
ROW = 26.0
LABEL = 66.0
# Kinds of memory with their opacity; passing: gathered values and unreduced gradients.
KINDS = {"parameters": 1.0, "gradients": 0.8, "optimizer": 0.6, "passing": 0.4, "activations": 0.25, "working": 0.15}
# Width of an action from which on the number of its microbatch is written on it.
ROOM_FOR_A_NUMBER = 15.0


def colour(stage: int) -> str:
    """Colour of a stage; neighbours differ in hue and lightness, for any number of stages."""
    return f"oklch({0.62 - 0.08 * (stage % 2):.2f} 0.11 {(250 + 137 * stage) % 360})"


def strip(partition: Partition) -> str:
    """Units in execution order, with widths by time, and the bytes that cross each cut."""
    total = sum(unit.seconds for unit in partition.units)
    count = len(partition.units)
    # A tenth of the width is shared evenly, so that units without any time are visible.
    widths = [
        0.9 * WIDTH * (unit.seconds / total if total else 1 / count) + 0.1 * WIDTH / count for unit in partition.units
    ]
    parts, x = [], 0.0
    for unit, width, before in zip(partition.units, widths, (None, *partition.units), strict=False):
        if before is not None and before.chunk != unit.chunk:
            nbytes = show_bytes(partition.cut_bytes[unit.chunk - 1])
            parts.append(element("line", x1=x, x2=x, y1=16.0, y2=70.0, class_="cut"))
            parts.append(element("text", nbytes, x=x, y=11.0, text_anchor="middle"))
        title = (
            f"{unit.name}\nstage {unit.stage}, chunk {unit.chunk}\n{show_seconds(unit.seconds)} per microbatch\n"
            f"{show_bytes(unit.held.total)} of states, {show_bytes(unit.activation_bytes)} of activations"
        )
        if not unit.relief.treatment.is_default:
            title += f"\n{name_of(unit.relief.treatment)}"
        parts.append(
            element(
                "rect",
                element("title", escape(title)),
                **{"x": x + 0.5, "y": 22.0, "width": max(width - 1, 0.5), "height": 42.0, "rx": 2},
                fill=colour(unit.stage),
            )
        )
        x += width
    return svg(WIDTH, 76.0, *parts, label="The units in execution order, coloured by stage")


def loads(partition: Partition) -> str:
    """Time and memory of each stage, side by side."""
    half = WIDTH / 2
    limits = [stage.memory_limit or 0 for stage in partition.stages]
    longest = max((stage.seconds for stage in partition.stages), default=0.0) or 1.0
    fullest = max([*(stage.memory_bytes for stage in partition.stages), *limits]) or 1
    parts = [
        element("text", "work of a step", x=LABEL, y=12.0, class_="title"),
        element("text", "most memory at once", x=half + LABEL, y=12.0, class_="title"),
    ]
    for number, stage in enumerate(partition.stages):
        y = 20.0 + ROW * number
        room = half - LABEL - 90
        parts.append(element("text", f"stage {number}", x=0.0, y=y + 14))
        width = room * stage.seconds / longest
        parts.append(_bar(LABEL, y, width, colour(number), f"stage {number}: {show_seconds(stage.seconds)}"))
        parts.append(element("text", show_seconds(stage.seconds), x=LABEL + width + 6, y=y + 14))
        parts += _memory(stage, half + LABEL, y, room / fullest, colour(number))
    parts.append(_legend(20.0 + ROW * partition.num_stages + 14, half + LABEL))
    return svg(WIDTH, 20.0 + ROW * partition.num_stages + 24, *parts, label="Time and memory of each stage")


def _memory(stage: StageLoad, x: float, y: float, scale: float, fill: str) -> list[str]:
    begin, parts = x, []
    for (kind, opacity), nbytes in zip(KINDS.items(), stage.fullest, strict=True):
        width = nbytes * scale
        parts.append(_bar(x, y, width, fill, f"{kind}: {show_bytes(nbytes)}", opacity))
        x += width
    if stage.memory_limit is not None:
        limit = begin + stage.memory_limit * scale
        parts.append(element("line", x1=limit, x2=limit, y1=y - 1, y2=y + 21, class_="limit"))
    parts.append(element("text", show_bytes(stage.memory_bytes), x=x + 6, y=y + 14))
    return parts


def _legend(y: float, x: float) -> str:
    parts = []
    for kind, opacity in KINDS.items():
        parts.append(element("rect", x=x, y=y - 9, width=10, height=10, class_="ink", opacity=opacity))
        parts.append(element("text", kind, x=x + 14, y=y, class_="small"))
        x += 22 + 7 * len(kind)  # a letter is less than 7 wide
    return "".join(parts)


def _bar(x: float, y: float, width: float, fill: str, title: str, opacity: float = 1) -> str:
    return element(
        "rect", element("title", escape(title)), x=x, y=y, width=width, height=20.0, fill=fill, opacity=opacity
    )


def timetable(plan: Plan, seconds: float | None = None) -> str:
    """Schedule as a Gantt chart, a row per stage; gaps are idle time.

    Args:
        plan: Schedule of a step.
        seconds: Time that the whole width stands for; ``None``: that of the step.
    """
    scale = (WIDTH - LABEL) / (seconds or plan.makespan or 1.0)
    parts: list[str] = []
    for number, (actions, spans) in enumerate(zip(plan.stages, plan.times, strict=True)):
        y = ROW * number
        parts.append(element("text", f"stage {number}", x=0.0, y=y + 15))
        for action, (start, end) in zip(actions, spans, strict=True):
            title = f"{action}: {show_seconds(start)} to {show_seconds(end)}"
            parts += block(action, LABEL + start * scale, y + 1, (end - start) * scale, ROW - 4, title)
    return svg(WIDTH, ROW * len(plan.stages), *parts, label="Timetable of a training step")


def block(action: Action, x: float, y: float, width: float, height: float, title: str) -> list[str]:
    """Action of a Gantt chart, with the number of its microbatch if there is room."""
    shape = {"x": x, "y": y, "width": max(width - 0.6, 0.3), "height": height}
    later = " later" if action.segment else ""
    parts = [element("rect", element("title", escape(title)), **shape, class_=f"{action.kind}{later}")]
    if width > ROOM_FOR_A_NUMBER:
        middle = {"x": x + width / 2, "y": y + height / 2 + 3, "text_anchor": "middle"}
        parts.append(element("text", str(action.microbatch), **middle, class_="number"))
    return parts
