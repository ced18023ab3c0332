"""The report at the end of the first training step."""

from textwrap import dedent

from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.figures.first_step_report import (
    MOST_COLUMNS,
    MOST_LINES,
    StageMeasurement,
    best_change,
    render_first_step,
)
from smp_strategy.planning.partition.partition import StageLoad
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from tests.unit.planning.schedule.flows import flow_of
from tests.unit.reports.explain.test_explanation import partition, unit

HELP = "What would help most: `microbatches=8`: idle 20% -> 11% (predicted)."


def test_it_says_where_what_is_and_what_it_takes():
    measured = [StageMeasurement(0, 0.3, 0.4, None), StageMeasurement(1, 0.1, 0.4, None)]
    text = render_first_step(
        MeshShape(pp=2, dp=2),
        partition(),
        8,
        num_parameters=[1_500_000, 400],
        measured=measured,
        plan=simulate(flow_of(0, 1), 4, Policy("1f1b")),
        change=HELP,
    )
    expected = """\
        Process mesh: 4 ranks = pp 2 x dp 2
        stage  ranks  units                             parameters  memory    work of a step
        0      1, 3   net.embed, net.h.0 .. net.h.2     1.5 M       20.0 MiB  96 ms, 300 ms
        1      0, 2   net.h.3 .. net.h.5, head<b>       400         16.0 MiB  96 ms, 100 ms
        """
    lines = text.splitlines()
    for found, wanted in zip(lines, dedent(expected).splitlines(), strict=False):
        assert found.split() == wanted.split()
    assert "Predicted, then measured in this first step. Memory: of the fullest rank, at its peak." in lines
    assert any(line.endswith("predicted, 400 ms measured (forward and backward).") for line in lines)
    # Half of two times 0.4 seconds was work.
    assert any(line.endswith("predicted, 50% measured): 1f1b") for line in lines)
    assert "stage 1   F0 B0 F1 B1 F2 B2 F3 B3" in lines
    assert HELP in lines
    assert "A training step sees 16 samples: 2 replicas read 8 each. Accumulated batches come on top." in lines


def test_of_a_single_process_nothing_is_said_that_takes_several():
    one = partition(units=partition().units[:1], stages=partition().stages[:1], cut_bytes=())
    measured = [StageMeasurement(0, 0.4, 0.4, None)]
    text = render_first_step(
        MeshShape(pp=1, dp=1), one, 8, num_parameters=[10], measured=measured, plan=simulate(flow_of(0), 4, Policy())
    )
    assert len(text.splitlines()) == 6
    assert not any(word in text for word in ("Schedule", "Limited", "replica", "idle"))


def test_memory_of_an_accelerator_is_measured():
    measured = [StageMeasurement(stage, 0.0, 0.0, (stage + 1) << 30) for stage in range(2)]
    lines = render_first_step(
        MeshShape(pp=2, dp=1), partition(), 8, num_parameters=[1, 2], measured=measured, plan=None
    ).splitlines()
    assert "20.0 MiB, 1.0 GiB" in lines[2]
    assert not any(line.startswith("Schedule") for line in lines)


def test_the_largest_one_fits_a_terminal():
    stages = 64
    loads = tuple(StageLoad(0.1, HeldBytes(1, 1, 1), 1) for _ in range(stages))
    names = tuple(unit(f"{'model' * 20}.block{number}.first", number // 3) for number in range(3 * stages))
    many = partition(units=names, stages=loads)
    measured = [StageMeasurement(stage, 0.3, 0.4, 1 << 30) for stage in range(stages)]
    plan = simulate(flow_of(*range(stages)), 128, Policy("1f1b"))
    text = render_first_step(
        MeshShape(pp=stages, dp=32, dp_shard=4, tp=8, node_size=8),
        many,
        4096,
        num_parameters=[10**10] * stages,
        measured=measured,
        plan=plan,
        change=HELP,
        split="120 of 124 layers are split over 8 ranks; layers between which each rank has some of the tokens: "
        "those of model.layers, model.vision.layers and model.audio.layers",
    )
    assert len(text.splitlines()) <= MOST_LINES
    assert max(map(len, text.splitlines())) <= MOST_COLUMNS
    assert "...    58 more stages" in text.splitlines()


def test_the_change_with_the_lowest_idle_share_is_named():
    found = {"`microbatches=8`": 0.11, "`pipeline=zb-h1`": 0.15}
    assert best_change(0.2, found) == HELP
    assert best_change(0.115, found) == ""
    assert best_change(0.2, {}) == ""
