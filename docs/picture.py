"""Draw the README's picture, ``docs/picture.svg``: one module in a single process and on a mesh of sixteen ranks.

    python docs/picture.py [FILE]

The planner decides on the partitions, the explanation's own drawings show them, and the mesh says which rank stands
where. Nothing is drawn by hand, so the picture changes when they do: ``tests/examples/test_readme.py`` compares it with
what this script draws.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt import GPT
from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sizes import show_bytes, show_seconds
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.offline_planning import trace_program
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.costs import Costs
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.planner import best_partition
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.reports.explain.drawings import WIDTH, colour, strip, timetable
from smp_strategy.reports.html import KINDS, element, svg

__all__ = ["PICTURE", "draw"]

PICTURE = Path(__file__).with_name("picture.svg")
MICROBATCHES = 16  # of the batch of all replicas
SHAPE = MeshShape(pp=4, dp=2, dp_shard=2, tp=2)
# Colours and a background of its own: an image knows nothing of the page around it, and few programs know `oklch`.
COLOURS = ("#3f78b5", "#9a5a2c", "#3d8f76", "#8a4a86")
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1c2330; } text.head { font-size: 14px; font-weight: 600; }
text.number { fill: #fff; font-size: 10px; } text.rank { fill: #fff; } .dim { fill: #667085; }
.cut { stroke: #1c2330; stroke-dasharray: 3 2; } .page { fill: #fbfbfc; }
"""
MARGIN = 20.0


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


def draw() -> str:
    """The picture as text."""
    single, mesh = planned(MeshShape(pp=1, dp=1)), planned(SHAPE)
    parts, y = _part("A single process", single, 0.0)
    note = "the model's units in execution order, as wide as they are slow: embeddings, blocks, norm, head"
    parts.append(element("text", note, y=33, class_="dim"))
    degrees = f"pp {SHAPE.pp} x sdp {SHAPE.dp_shard} x tp {SHAPE.tp}"
    more, y = _part(f"{SHAPE.world_size} ranks: {degrees}", mesh, y + 30, _ranks(mesh[0].num_stages))
    parts += [*more, _keys(y + 26)]
    height = y + 44 + MARGIN
    page = element("rect", width="100%", height="100%", class_="page")
    fills = [f".{kind} {{ fill: {fill}; }}\n" for kind, (_, fill) in KINDS.items()]
    inside = element("g", *parts, transform=f"translate({MARGIN:g} {MARGIN:g})")
    width = WIDTH + 2 * MARGIN
    picture = svg(
        width, height, element("style", STYLE, *fills), page, inside, label="A module in one process and on 16 ranks"
    )
    for stage, fill in enumerate(COLOURS):
        picture = picture.replace(colour(stage), fill)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    return picture.replace("<svg", f"<svg {size}", 1) + "\n"


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


def _keys(y: float) -> str:
    parts, x = [], 66.0
    for kind in ("F", "B"):
        name, fill = KINDS[kind]
        parts.append(element("rect", x=x, y=y - 9, width=10, height=10, fill=fill))
        parts.append(element("text", f"{name} of a microbatch", x=x + 14, y=y))
        x += 170
    note = "gaps: idle; a scale for each timetable; times: the planner's model of a CPU, without collectives"
    return "".join([*parts, element("text", note, x=x, y=y, class_="dim")])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(f"written to {target}")
