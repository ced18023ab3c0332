"""Draw the pictures of the README and the pages, ``docs/pictures/*.svg``::

    python docs/pictures.py [FOLDER]

The planner decides on partitions, schedules and memory, the package's own drawings show them, and the mesh says which
rank stands where. Nothing is drawn by hand, so a picture changes when they do: ``tests/examples/test_readme.py``
compares all of them with what this script draws. Measured figures come from tables on the pages, and from a trace that
``benchmarks/measured_step.py`` has written.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt import GPT
from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sizes import show_bytes, show_seconds
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.commands.layout_planning import LayoutPlanner
from smp_strategy.engine.commands.offline_planning import trace_program
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.recording import Recording, Span
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.costs import Costs
from smp_strategy.planning.layouts.cluster import Cluster, JobLayout
from smp_strategy.planning.layouts.estimate import MemoryByCategory
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.planner import best_partition
from smp_strategy.planning.schedule.flow import route
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.reports.explain.drawings import WIDTH, colour, loads, strip, timetable
from smp_strategy.reports.html import KINDS, element, svg
from smp_strategy.reports.timeline.comparison import Comparison
from smp_strategy.reports.timeline.page import AXIS, STAGE, drawing

__all__ = ["PICTURES", "draw_all"]

MICROBATCHES = 16  # of the batch of all replicas
SHAPE = MeshShape(pp=4, dp=2, dp_shard=2, tp=2)
# Colours and a background of its own: an image knows nothing of the page around it, and few programs know `oklch`.
COLOURS = ("#3f78b5", "#9a5a2c", "#3d8f76", "#8a4a86")
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1c2330; } text.head { font-size: 14px; font-weight: 600; }
text.number { fill: #fff; font-size: 10px; } text.rank { fill: #fff; } .dim, text.small, text.title { fill: #667085; }
.cut, .axis { stroke: #1c2330; } .cut { stroke-dasharray: 3 2; } .ink { fill: #1c2330; } .page { fill: #fbfbfc; }
.limit { stroke: #d92d20; stroke-width: 2; } .later { opacity: .72; }
.grid { stroke: #8b93a3; stroke-opacity: .35; } .end { stroke: #1c2330; } .end.then { stroke-dasharray: 3 2; }
.waiting { opacity: .25; } .predicted rect { opacity: .6; }
@media (prefers-color-scheme: dark) {
text, .ink { fill: #e6e9ef; } text.number, text.rank { fill: #fff; } .dim, text.small, text.title { fill: #98a2b3; }
.cut, .axis, .end { stroke: #e6e9ef; } .page { fill: #1b1e27; } }
"""
MARGIN = 20.0
# Categories of the memory of a rank, in the order of `MemoryByCategory`.
CATEGORIES = {
    "parameters": "#3f78b5",
    "gradients": "#3d8f76",
    "optimizer": "#9a5a2c",
    "gathered": "#8a4a86",
    "activations": "#8b93a3",
    "working": "#b08d3a",
}


def planned(shape: MeshShape) -> tuple[Partition, Plan]:
    """Partition and schedule of the example's GPT on a mesh of this shape, as the planner decides."""
    with torch.device("meta"):  # no weights are needed to decide
        model = GPT(context=128, layers=8, heads=4, width=256)

    def step(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    num_microbatches = MICROBATCHES // shape.dp
    config = SMPConfig.from_options(
        pipeline_parallel_degree=shape.pp,
        sharded_data_parallel_degree=shape.dp_shard,
        tensor_parallel_degree=shape.tp,
        microbatches=num_microbatches,
        pipeline="1f1b",
    )
    tokens = torch.zeros(1, 129, dtype=torch.int64)
    program = trace_program(config, model, step, tokens, num_stages=shape.pp)
    partition = best_partition(config, program, shape.pp)
    flow = Costs(machine=Machine.nominal("cpu")).flow(program.trace, partition.stage_of, shape.pp)
    return partition, simulate(flow, num_microbatches, Policy("1f1b"), program.link)


def picture(height: float, *inside: str, label: str) -> str:
    """A file of its own: a background, colours for light and dark, and a size."""
    fills = [f".{kind} {{ fill: {fill}; }}\n" for kind, (_, fill) in KINDS.items()]
    page = element("rect", width="100%", height="100%", class_="page")
    moved = element("g", *inside, transform=f"translate({MARGIN:g} {MARGIN:g})")
    width, height = WIDTH + 2 * MARGIN, height + 2 * MARGIN
    drawn = svg(width, height, element("style", STYLE, *fills), page, moved, label=label)
    for stage, fill in enumerate(COLOURS):
        drawn = drawn.replace(colour(stage), fill)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    return drawn.replace("<svg", f"<svg {size}", 1) + "\n"


def ranks() -> str:
    """One module in a single process and on a mesh of sixteen ranks."""
    single, mesh = planned(MeshShape(pp=1, dp=1)), planned(SHAPE)
    parts, y = _part("A single process", single, 0.0)
    note = "the model's units in execution order, as wide as they are slow: embeddings, blocks, norm, head"
    parts.append(element("text", note, y=33, class_="dim"))
    degrees = f"pp {SHAPE.pp} x sdp {SHAPE.dp_shard} x tp {SHAPE.tp}"
    more, y = _part(f"{SHAPE.world_size} ranks: {degrees}", mesh, y + 30, _ranks(mesh[0].num_stages))
    note = "gaps: idle; a scale for each timetable; times: the planner's model of a CPU, without collectives"
    parts += [*more, _keys(y + 26, note)]
    return picture(y + 44, *parts, label="A module in one process and on 16 ranks")


def stages() -> str:
    """The example's GPT cut into four stages, with work and memory of each."""
    partition, plan = planned(MeshShape(pp=4, dp=1))
    note = "units in execution order, as wide as they are slow; above each cut: the bytes that a microbatch sends"
    parts = [
        element("text", "A model, cut into four stages", y=12.0, class_="head"),
        element("text", note, x=250.0, y=12.0, class_="dim"),
        _placed(strip(partition), 26.0, 76.0),
        _placed(loads(partition), 114.0, 148.0),
        element("text", "Their timetable", y=290.0, class_="head"),
        _placed(timetable(plan), 302.0, 104.0),
        _keys(430.0, "gaps: idle"),
    ]
    return picture(438.0, *parts, label="A model cut into four stages, their work, memory and timetable")


def schedules() -> str:
    """Schedules of four equal stages and eight microbatches, on one scale of time."""
    policies = (Policy("simple"), Policy("1f1b"), Policy("1f1b", 2), Policy("zb-v", 2))
    plans = {policy: _equal_stages(policy, num_stages=4, num_microbatches=8) for policy in policies}
    longest = max(plan.makespan for plan in plans.values())
    parts: list[str] = []
    y = 0.0
    for policy, plan in plans.items():
        title = f"pipeline={policy.name}" + (f", {policy.num_chunks} chunks" if policy.num_chunks > 1 else "")
        parts.append(element("text", title, y=y + 12, class_="head"))
        note = f"{plan.makespan:g} units of time, stages idle for {plan.bubble:.0%}"
        parts.append(element("text", note, x=250.0, y=y + 12))
        parts.append(_placed(timetable(plan, longest), y + 20, 104.0))  # all on one scale
        y += 142
    parts.append(_keys(y + 6, "faint: the second chunk; gaps: idle", KINDS))
    return picture(y + 14, *parts, label="Four schedules of four stages and eight microbatches")


def memory() -> str:
    """Memory of the fullest rank by category, for some layouts of a GPT on eight devices."""
    with torch.device("meta"):
        model = GPT(context=2048, layers=16, heads=44, width=5632)
    planner = LayoutPlanner(
        module=model,
        step=lambda tokens: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
        batch_of=lambda samples: torch.zeros(samples, 2049, dtype=torch.int64, device="meta"),
        cluster=Cluster.read("8xa100"),
        options={"bf16": True},
        memory_limit=2**60,
    )
    layouts = {
        "eight replicas": JobLayout(1, 1, 1, 8, 1, 1),
        "pp8": JobLayout(8, 1, 1, 1, 8, 1),
        "pp8, recompute": JobLayout(8, 1, 1, 1, 8, 1, recomputes=True),
        "pp2_sdp4": JobLayout(2, 1, 4, 1, 2, 1),
        "tp8": JobLayout(1, 8, 1, 1, 8, 1),
        "sdp8": JobLayout(1, 1, 8, 1, 1, 1),
        "sdp8, recompute": JobLayout(1, 1, 8, 1, 1, 1, recomputes=True),
    }
    amounts = {name: planner.estimate(layout).estimates[0].memory for name, layout in layouts.items()}
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    limit = planner.cluster.device.memory_bytes
    return _memory(amounts, limit, f"Memory of a rank: {billions:.1f} billion parameters on eight devices, bf16")


def microbatches() -> str:
    """The way of a batch through three stages; arrows follow its first microbatch."""
    count, num_stages, top, row, height = 4, 3, 46.0, 52.0, 28.0
    plan = _equal_stages(Policy("1f1b"), num_stages, count)
    left = 190.0
    scale = (WIDTH - left) / plan.makespan
    parts = [element("text", f"A batch of {2 * count} samples", y=12.0, class_="head")]
    for number in range(count):
        y = top + number * 34.0
        parts.append(element("rect", x=0.0, y=y, width=86.0, height=height, rx=2, fill=COLOURS[number]))
        parts.append(element("text", f"microbatch {number}", x=43.0, y=y + 18, text_anchor="middle", class_="number"))
    parts.append(element("text", "through three stages, forward and back", x=left, y=12.0, class_="head"))
    at: dict[tuple[str, int], tuple[float, float, float]] = {}
    for stage, (actions, spans) in enumerate(zip(plan.stages, plan.times, strict=True)):
        y = top + stage * row
        parts.append(element("text", f"stage {stage}", x=left - 56, y=y + 18))
        for action, (start, end) in zip(actions, spans, strict=True):
            x, width = left + start * scale, (end - start) * scale - 1.5
            later = {"opacity": 0.75} if action.kind == "B" else {}
            shape = {"x": x, "y": y, "width": width, "height": height, "rx": 2, "fill": COLOURS[action.microbatch]}
            parts.append(element("rect", **shape, **later))
            middle = {"x": x + width / 2, "y": y + 18, "text_anchor": "middle"}
            parts.append(element("text", str(action), **middle, class_="number"))
            if action.microbatch == 0:
                at[action.kind, stage] = x + width / 2, y, y + height
    for stage in range(num_stages - 1):
        parts.append(_arrow(at["F", stage][0], at["F", stage][2], at["F", stage + 1][0], at["F", stage + 1][1]))
        parts.append(_arrow(at["B", stage + 1][0], at["B", stage + 1][1], at["B", stage][0], at["B", stage][2]))
    y = top + num_stages * row + 4
    note = "F: forward; B (fainter): backward; gaps: idle; arrows: activations go down, their gradients come back"
    parts.append(element("text", note, x=left, y=y, class_="dim"))
    return picture(y + 8, *parts, label="A batch in microbatches on its way through three stages")


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head, to a point that is above or below."""
    down = 1 if y2 > y1 else -1
    tip = f"M{x2:g} {y2:g} l-4 {-6 * down} l8 0 z"
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2 - 5 * down, class_="axis") + element("path", d=tip, class_="ink")


def idle() -> str:
    """Idle time of four equal stages, over the number of microbatches."""
    counts = (4, 8, 16, 32, 64)
    policies = {
        "simple, 1f1b": Policy("1f1b"),
        "1f1b, 2 chunks": Policy("1f1b", 2),
        "zb-h1": Policy("zb-h1"),
        "zb-v": Policy("zb-v", 2),
    }
    left, top, room, height = 190.0, 34.0, WIDTH - 260.0, 190.0
    shares = {
        name: [_equal_stages(policy, num_stages=4, num_microbatches=count).bubble for count in counts]
        for name, policy in policies.items()
    }
    most = 0.5
    parts = [element("text", "Idle time of four equal stages, by the number of microbatches", y=12.0, class_="head")]
    for percent in range(0, 51, 10):
        y = top + height * (1 - percent / 100 / most)
        parts.append(element("line", x1=left, x2=left + room, y1=y, y2=y, class_="grid"))
        parts.append(element("text", f"{percent}%", x=left + room + 8, y=y + 4, class_="small"))
    xs = [left + room * number / (len(counts) - 1) for number in range(len(counts))]
    for x, count in zip(xs, counts, strict=True):
        parts.append(element("text", str(count), x=x, y=top + height + 18, text_anchor="middle"))
    parts.append(element("text", "microbatches", x=left - 12, y=top + height + 18, text_anchor="end", class_="small"))
    for fill, (name, values) in zip(COLOURS, shares.items(), strict=True):
        ys = [top + height * (1 - value / most) for value in values]
        points = " ".join(f"{x:.6g},{y:.6g}" for x, y in zip(xs, ys, strict=True))
        parts.append(element("polyline", points=points, fill="none", stroke=fill, stroke_width=2))
        parts += [element("circle", cx=x, cy=y, r=3, fill=fill) for x, y in zip(xs, ys, strict=True)]
        parts.append(element("text", f"{name}: {values[0]:.0%}", x=left - 12, y=ys[0] + 4, text_anchor="end"))
    return picture(top + height + 24, *parts, label="Idle time of four schedules by the number of microbatches")


def links() -> str:
    """The table of the page about sharding: seconds and bytes of a step on two nodes with a slow link."""
    page = (Path(__file__).parent / "sharding.md").read_text()
    table = page.partition("| | seconds per step | MB on the link per node and step |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    left, half = 320.0, (WIDTH - 320.0) / 2
    parts = [
        element("text", "A training step on two nodes, 200 Mbit/s between them", y=12.0, class_="head"),
        element("text", "seconds per step", x=left, y=36.0, class_="title"),
        element("text", "MB on the link per node and step", x=left + half, y=36.0, class_="title"),
    ]
    most = [max(float(row[column]) for row in rows) for column in (1, 2)]
    for number, (name, *cells) in enumerate(rows):
        y = 46.0 + 26.0 * number
        parts.append(element("text", name.replace("`", ""), x=0.0, y=y + 15))
        for column in (0, 1):
            x, width = left + column * half, (half - 60) * float(cells[column]) / most[column]
            fill = COLOURS[0] if name.startswith("ours") else "#8b93a3"
            parts.append(element("rect", x=x, y=y, width=width, height=20.0, rx=2, fill=fill))
            parts.append(element("text", cells[column], x=x + width + 6, y=y + 14))
    y = 46.0 + 26.0 * len(rows)
    return picture(y + 4, *parts, label="Time and bytes of a step of sharded training over a slow link")


def measured() -> str:
    """A step as it was, over what was predicted, from the trace of a run."""
    trace = json.loads((Path(__file__).with_suffix("") / "measured.json").read_text())
    slices: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices.setdefault(event["pid"], {}).setdefault(event["cat"], []).append(event)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    stages = [slices[pid] for pid in sorted(slices, key=lambda pid: names[pid])]

    def span(event: dict[str, Any]) -> tuple[float, float]:
        return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6

    plan = Plan(
        stages=tuple(tuple(Action.parse(each["name"]) for each in stage["predicted"]) for stage in stages),
        times=tuple(tuple(span(each) for each in stage["predicted"]) for stage in stages),
    )
    recordings = [
        Recording(
            tuple(
                Span(Action.parse(each["name"]), *span(each), each["args"]["waited_us"] / 1e6)
                for each in stage["measured"]
            ),
            end=max(span(each)[1] for each in stage["measured"]),
        )
        for stage in stages
    ]
    comparison = Comparison(plan, recordings)
    height = AXIS + STAGE * len(stages)
    parts = [
        element("text", f"A step of {show_seconds(comparison.seconds)}, over its prediction", y=12.0, class_="head"),
        _placed(drawing(comparison), 24.0, height),
        _keys(height + 44, "faint: waits for a message; lines: the end, measured and (dashed) predicted"),
    ]
    return picture(height + 52, *parts, label="The measured timetable of a step over the predicted one")


def _memory(amounts: dict[str, MemoryByCategory], limit: int, title: str) -> str:
    left, room = 120.0, WIDTH - 200.0
    scale = room / max(amount.total for amount in amounts.values())
    parts = [element("text", title, y=12.0, class_="head")]
    y = 34.0
    for name, amount in amounts.items():
        x = left
        parts.append(element("text", name, y=y + 15))
        for nbytes, fill in zip(amount, CATEGORIES.values(), strict=True):
            parts.append(element("rect", x=x, y=y, width=nbytes * scale, height=22.0, fill=fill))
            x += nbytes * scale
        parts.append(element("text", show_bytes(amount.total), x=x + 6, y=y + 15))
        y += 30
    at = left + limit * scale
    parts.append(element("line", x1=at, x2=at, y1=28.0, y2=y, class_="limit"))
    parts.append(element("text", f"the device has {show_bytes(limit)}", x=at + 4, y=y + 8))
    x = left
    for name, fill in CATEGORIES.items():
        parts.append(element("rect", x=x, y=y + 20, width=10, height=10, fill=fill))
        parts.append(element("text", name, x=x + 14, y=y + 29, class_="small"))
        x += 96
    return picture(y + 34, *parts, label=title)


def _equal_stages(policy: Policy, num_stages: int, num_microbatches: int) -> Plan:
    """Plan of a chain of chunks; forward, input gradients and weight gradients of a stage take a unit of time each."""
    count = num_stages * policy.num_chunks
    values = [Value(number, 8, requires_grad=True) for number in range(count)]
    events = [
        Event("unit", f"unit{number}", tuple(values[max(number - 1, 0) : number]), (value,))
        for number, value in enumerate(values)
    ]
    stage_of = {event.name: policy.stage_of_chunk(number, num_stages) for number, event in enumerate(events)}
    work = dict.fromkeys(range(count), Work(1.0, 1.0, 1.0).scaled(1 / policy.num_chunks))
    flow = route(Trace(events, count - 1), stage_of, num_stages, work)
    return simulate(flow, num_microbatches, policy, split_overhead=0.0)


def _part(
    title: str, decided: tuple[Partition, Plan], y: float, ranks: tuple[list[str], float] = ([], 0.0)
) -> tuple[list[str], float]:
    """A layout: its title, the model cut into stages, its ranks, its timetable; and where all that ends."""
    partition, plan = decided
    states = show_bytes(max(stage.held.states for stage in partition.stages))
    step = show_seconds(plan.makespan)
    parts = [
        element("text", title, y=y + 12, class_="head"),
        element(
            "text",
            f"a rank holds up to {states} of weights, gradients and optimizer state; "
            f"a step of {MICROBATCHES} microbatches takes {step}",
            x=250.0,
            y=y + 12,
        ),
        _placed(strip(partition), y + 22, 76.0),
    ]
    y += 104
    parts.append(element("g", *ranks[0], transform=f"translate(0 {y:g})"))
    y += ranks[1]
    height = 26.0 * partition.num_stages
    parts.append(_placed(timetable(plan), y, height))
    return parts, y + height


def _placed(drawing: str, y: float, height: float) -> str:
    """A drawing of the package at its place; its style asks for the width of a page."""
    drawing = re.sub(r' style="[^"]*"', "", drawing, count=1)
    return drawing.replace("<svg", f'<svg y="{y:g}" width="{WIDTH:g}" height="{height:g}"', 1)


def _ranks(num_stages: int) -> tuple[list[str], float]:
    """Ranks on the mesh: a row per replica, a column per stage."""
    parts, column, row = [], 220.0, 28.0
    for replica in range(SHAPE.dp):
        y = row * replica
        parts.append(element("text", f"replica {replica}", y=y + 16))
        for stage in range(num_stages):
            x = 66 + stage * (column + 4)
            for part in range(SHAPE.tp):
                left, width = x + part * column / SHAPE.tp, column / SHAPE.tp - 1
                rank = SHAPE.rank_at(replica, stage, part)
                parts.append(element("rect", x=left, y=y, width=width, height=24.0, rx=2, fill=colour(stage)))
                middle = {"x": left + width / 2, "y": y + 16, "text_anchor": "middle"}
                parts.append(element("text", f"rank {rank}, part {part}", **middle, class_="rank"))
    note = (
        f"The {SHAPE.tp} ranks of a stage in a replica split its layers (tp); the {SHAPE.dp_shard} replicas read "
        "samples of their own and share out parameters, gradients and state (sdp)."
    )
    height = row * SHAPE.dp
    return [*parts, element("text", note, x=66.0, y=height + 10, class_="dim")], height + 24


def _keys(y: float, note: str, kinds: Iterable[str] = ("F", "B")) -> str:
    parts, x = [], 66.0
    for kind in kinds:
        name, fill = KINDS[kind]
        parts.append(element("rect", x=x, y=y - 9, width=10, height=10, fill=fill))
        parts.append(element("text", name, x=x + 14, y=y))
        x += 142
    return "".join([*parts, element("text", note, x=x, y=y, class_="dim")])


PICTURES: dict[str, Callable[[], str]] = {
    "ranks": ranks,
    "stages": stages,
    "schedules": schedules,
    "memory": memory,
    "microbatches": microbatches,
    "idle": idle,
    "links": links,
    "measured": measured,
}


def draw_all(folder: Path) -> None:
    """Write all pictures into ``folder``."""
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(""))
