"""Explanation of a partition as text, JSON and HTML."""

import json
from dataclasses import replace
from textwrap import dedent

import pytest

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.cli import main
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.work import Link, Work
from smp_strategy.planning.partition.partition import Partition, PlacedUnit, StageLoad, UnitActivations
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import with_period
from smp_strategy.reports.explain.explanation import Explanation
from smp_strategy.reports.explain.module_tree import abbreviate, rows_of, tree_of
from smp_strategy.reports.explain.text import sends_on, summary
from smp_strategy.reports.explain.text_activations import name_of, relief_rows
from tests.unit.planning.schedule.flows import flow_of
from tests.unit.reports.pages import Page

KIB, MIB = 1 << 10, 1 << 20


def unit(name: str, stage: int, chunk: int | None = None, size: int = MIB) -> PlacedUnit:
    held = HeldBytes(size, size, 2 * size)
    return PlacedUnit(name, stage, stage if chunk is None else chunk, held, 3 * KIB, KIB, Work(0.001, 0.002, 0.003))


UNITS = (
    unit("net.embed", 0, size=2 * MIB),
    *(unit(f"net.h.{index}", index // 3) for index in range(6)),
    unit("head<b>", 1),
)


def partition(**changes) -> Partition:
    loads = [
        StageLoad(0.096, HeldBytes(5 * MIB, 5 * MIB, 10 * MIB), 24 * KIB, 64 * MIB),
        StageLoad(0.096, HeldBytes(4 * MIB, 4 * MIB, 8 * MIB), 12 * KIB),
    ]
    known = {
        "units": UNITS,
        "stages": tuple(loads),
        "cut_bytes": (KIB,),
        "schedule": "1f1b",
        "num_microbatches": 4,
        "step_seconds": 0.12,
        "cost": 1.25,
        "lower_bound": 1.25,
        "limited_by": "time of stage 1",
    }
    return Partition(**known | changes)


def plan(policy: str = "1f1b"):
    return simulate(flow_of(0, 1), 4, Policy(policy))


def test_of_one_stage_nothing_is_said_that_takes_several():
    one = partition(units=UNITS[:1], stages=partition().stages[:1], cut_bytes=(), num_microbatches=1)
    assert summary(one) == ["1 unit on one stage, 1 microbatch", "The work of a step takes 120 ms (simulated)."]


def test_the_tree_has_the_modules_of_the_names_and_alike_siblings_in_one_line():
    rows = [(row.depth, row.label, row.node.stages) for row in rows_of(tree_of(UNITS))]
    assert rows == [
        (0, "net", (0, 1)),
        (1, "embed", (0,)),
        (1, "h", (0, 1)),
        (2, "0 .. 2 (3 alike)", (0,)),
        (2, "3 .. 5 (3 alike)", (1,)),
        (0, "head<b>", (1,)),
    ]


def test_siblings_that_differ_in_a_cost_have_a_line_each():
    rows = [row.label for row in rows_of(tree_of([unit("h.9", 0), unit("h.10", 0), unit("h.11", 0, size=7)]))]
    assert rows == ["h", "9 .. 10 (2 alike)", "11"]


def test_modules_with_a_single_part_are_one_line_and_inner_lines_are_sums():
    (top,) = tree_of([unit("model.body.a", 0), unit("model.body.b", 1)])
    assert top.label == "model.body"
    assert top.held == HeldBytes(2 * MIB, 2 * MIB, 4 * MIB)
    assert top.seconds == pytest.approx(0.012)
    assert top.activation_bytes == 6 * KIB


def test_numbered_names_are_abbreviated():
    assert abbreviate(["a.wte", "a.h.0", "a.h.1", "a.h.2", "b"]) == "a.wte, a.h.0 .. a.h.2, b"


def test_the_text_says_what_was_decided_how_good_it_is_and_what_limits_it():
    text = str(Explanation(partition(), plan()))
    assert text.startswith(
        dedent("""
        8 units on 2 stages, schedule 1f1b with 4 microbatches
        A step takes 120 ms (simulated); the stages wait 20.0% of it, their work is balanced to 100.0%.
        Limited by the time of stage 1. No contiguous partition is better: this is proven.
        """).lstrip()
    )
    assert "head<b>" in text
    assert "64.0 MiB" in text
    assert "stage 0   F0 F1 B0 F2 B1 F3 B2 B3" in text


def test_what_comes_and_goes_is_told_where_something_does():
    stages = tuple(
        replace(load, held=load.held._replace(gathered=3 * MIB, unreduced=4 * MIB)) for load in partition().stages
    )
    spread = Explanation(partition(stages=stages))
    (row,) = (line for line in str(spread).splitlines() if line.startswith("│ 0  "))
    assert [cell.strip() for cell in row.split("│")][4:9] == ["20.0 MiB", "7.0 MiB", "24.0 KiB", "0 B", "27.0 MiB"]
    assert "7.0 MiB" in Page(spread.to_html()).words
    assert "passing" not in str(Explanation(partition()))


@pytest.mark.parametrize(
    ("bound", "said"),
    [(1.0, "could save 20.0% at most"), (0.0, "Nothing is known about better partitions")],
)
def test_a_partition_without_a_proof_says_so(bound, said):
    assert said in str(Explanation(partition(lower_bound=bound)))


def test_a_stage_sends_on_what_leaves_each_of_its_chunks():
    chunks = (unit("a", 0, 0), unit("b", 1, 1), unit("c", 0, 2), unit("d", 0, 2), unit("e", 1, 3))
    found = partition(units=chunks, cut_bytes=(1, 10, 100))
    assert (sends_on(found, 0), sends_on(found, 1)) == (101, 10)


def test_the_data_are_the_partition_and_what_follows_from_it():
    data = json.loads(Explanation(partition(), plan()).to_json())
    assert data["period_seconds"] is None, "nobody has found out"
    kept = {key: data[key] for key in json.loads(partition().to_json())}
    assert Partition.from_json(json.dumps(kept)) == partition()
    assert data["bubble"] == pytest.approx(0.2)
    assert [entry["action"] for entry in data["timetable"][1]][:3] == ["F0", "B0", "F1"]
    assert json.loads(Explanation(partition()).to_json())["timetable"] is None


def test_it_is_said_how_much_steps_in_a_row_overlap():
    flow = flow_of(0, 1)
    graph = StepGraph(flow, 4, Link.instant(), 0.0)
    for policy, said in (("zb-h2", "idle 8%; steps in a row overlap by 8%"), ("1f1b", "idle 20%")):
        made = with_period(simulate(flow, 4, Policy(policy), split_overhead=0.0), graph)
        explanation = Explanation(partition(), made)
        assert f"Schedule of a training step ({said})\n" in str(explanation)
        assert any(words.endswith(said) for words in Page(explanation.to_html()).words)
        assert json.loads(explanation.to_json())["period_seconds"] == made.period


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1"])
def test_the_page_is_whole_and_draws_every_action(policy):
    made = plan(policy)
    page = Page(Explanation(partition(), made).to_html())
    drawn = [kind for kind in page.rectangles if kind in {"F", "B", "I", "W"}]
    assert sorted(drawn) == sorted(action.kind for actions in made.stages for action in actions)
    assert "head<b>" in page.words, "names are escaped"
    assert "1.0 KiB" in page.words


def test_the_page_loads_nothing_and_runs_nothing():
    html = Explanation(partition(), plan()).to_html()
    assert not any(word in html for word in ("<script", "src=", "href=", "@import", "url("))


def test_units_without_any_time_are_drawn_and_written():
    idle = tuple(replace(unit, work=Work()) for unit in UNITS)
    stages = tuple(replace(load, seconds=0.0) for load in partition().stages)
    explanation = Explanation(partition(units=idle, stages=stages, step_seconds=0.0))
    Page(explanation.to_html())
    assert "0 us" in str(explanation)


def test_the_ending_of_a_file_says_the_form(tmp_path):
    explanation = Explanation(partition(), plan())
    for name, begin in (("a.txt", "8 units"), ("b.json", "{"), ("deeper/c.html", "<!doctype html>")):
        explanation.save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(begin)
    with pytest.raises(ConfigError, match=r"'d\.pdf'. Change its ending"):
        explanation.save(tmp_path / "d.pdf")


def test_a_partition_file_is_explained_on_the_command_line(tmp_path, capsys):
    partition().save(tmp_path / "partition.json")
    assert main(["explain", str(tmp_path / "partition.json")]) == 0
    assert capsys.readouterr().out == f"{Explanation(partition())}\n"
    assert main(["explain", str(tmp_path / "partition.json"), str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == Explanation(partition()).to_html() + "\n"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"[]", b"{}"])
def test_what_is_no_partition_is_no_traceback_on_the_command_line(tmp_path, capsys, content):
    (tmp_path / "p.json").write_bytes(content)
    assert main(["explain", str(tmp_path / "p.json")]) == 2
    assert "no partition" in capsys.readouterr().err


def relieved() -> Partition:
    """The first block is computed again, and what the second one keeps is in host memory."""
    first = UnitActivations(treatment=ActivationPolicy(recompute="all"), spared_bytes=2 * KIB, seconds=0.003)
    second = UnitActivations(treatment=ActivationPolicy(offload=True), spared_bytes=3 * KIB, offloaded_bytes=3 * KIB)
    units = (UNITS[0], replace(UNITS[1], relief=first), replace(UNITS[2], relief=second), *UNITS[3:])
    stages = partition().stages
    return partition(units=units, stages=(replace(stages[0], all_kept_bytes=48 * KIB), stages[1]))


def test_each_stage_says_what_it_spares_at_what_price():
    *_, first, second = summary(relieved())
    assert first == (
        "Stage 0: 2 of 4 units keep less for backward, 24.0 KiB at the peak instead of 48.0 KiB, there is room for "
        "44.0 MiB; its work takes 12.5% longer."
    )
    assert second == "Stage 1: units keep everything for backward, 12.0 KiB at the peak."


def test_units_that_do_the_same_with_what_they_keep_are_one_row():
    assert relief_rows(relieved()) == [
        ("0", "net.embed", "kept", "3.0 KiB", "", "", ""),
        ("0", "net.h.0", "inputs kept, the rest computed again", "3.0 KiB", "2.0 KiB", "", "+ 3 ms"),
        ("0", "net.h.1", "in host memory", "3.0 KiB", "3.0 KiB", "3.0 KiB", ""),
        ("0", "net.h.2", "kept", "3.0 KiB", "", "", ""),
        ("1", "net.h.3 .. net.h.5, head<b>", "kept", "12.0 KiB", "", "", ""),
    ]
    assert relief_rows(partition()) == []


def test_the_page_and_the_data_say_what_units_keep():
    page, data = Explanation(relieved()).to_html(), json.loads(Explanation(relieved()).to_json())
    Page(page)
    assert "Kept for backward" in page
    assert "in host memory" in page
    assert "Kept for backward" not in Explanation(partition()).to_html()
    assert data["units"][1]["relief"]["treatment"]["recompute"] == "all"
    assert data["stages"][0]["all_kept_bytes"] == 48 * KIB


def test_what_is_kept_of_a_unit_that_is_computed_again_may_be_on_the_host():
    expected = "inputs in host memory, products kept, the rest computed again"
    assert name_of(ActivationPolicy(recompute="cheap", offload=True)) == expected
