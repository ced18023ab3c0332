"""Timeline of a step as text, Chrome trace and HTML."""

import json
from dataclasses import replace

import pytest

from smp_strategy.activations.policy import OffloadStats
from smp_strategy.errors import ConfigError
from smp_strategy.pipeline.recording import Recording, Span
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.reports.timeline.comparison import Comparison, KindTimes
from smp_strategy.reports.timeline.timeline import Timeline
from tests.unit.planning.schedule.flows import flow_of
from tests.unit.reports.pages import Page

FORWARD, BACKWARD = Action("F", 0), Action("B", 0)


def small(**changes) -> Timeline:
    """Two stages, one microbatch: forwards take what was predicted, backwards half more.

    ::

        stage 0   F0 . . . . B0      predicted   F0 . . . B0
        stage 1   w  F0 - B0                     .  F0 B0
    """
    plan = Plan(stages=((FORWARD, BACKWARD),) * 2, times=(((0.0, 0.1), (0.4, 0.6)), ((0.1, 0.2), (0.2, 0.4))))
    stages = (
        Recording((Span(FORWARD, 0.0, 0.1, 0.0), Span(BACKWARD, 0.125, 0.825, 0.4)), 0.85),
        Recording((Span(FORWARD, 0.0, 0.2, 0.1), Span(BACKWARD, 0.225, 0.525, 0.0)), 0.825),
    )
    given = {"plan": plan, "stages": stages, "ranks": (5, 4), "step": 7, "rank": 0}
    return Timeline(**given | changes)


def as_planned(policy: str = "1f1b", stages: int = 3, scale: float = 0.01) -> Timeline:
    """Every action when it was predicted."""
    plan = simulate(flow_of(*range(stages)), 6, Policy(policy))
    plan = replace(plan, times=tuple(tuple((a * scale, b * scale) for a, b in times) for times in plan.times))
    recordings = tuple(
        Recording(tuple(Span(each, *span, 0.0) for each, span in zip(actions, times, strict=True)), times[-1][1])
        for actions, times in zip(plan.stages, plan.times, strict=True)
    )
    return Timeline(plan=plan, stages=recordings, ranks=tuple(reversed(range(stages))), step=1, rank=0)


def off_plan() -> Timeline:
    """A microbatch of :func:`small` took another path: stage 1 has left its plan after its forward."""
    first, second = small().stages
    return small(stages=(first, Recording(second.spans[:1], 0.6, left_plan=True)))


def test_what_was_offloaded_is_told_where_something_was():
    assert "Offloaded" not in str(small())
    first, second = small().stages
    traffic = OffloadStats(bytes_out=3 << 20, bytes_in=2 << 20, most_on_host=1 << 20, num_late=7)
    timeline = small(stages=(replace(first, traffic=traffic), second))
    row = next(line for line in str(timeline).split("Offloaded activations")[1].splitlines() if "3.0 MiB" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == ["0", "5", "3.0 MiB", "2.0 MiB", "1.0 MiB", "7", "0"]
    assert "Offloaded activations" in timeline.to_html()


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_time_of_a_stage_has_parts_that_add_up_to_the_step():
    comparison = small().comparison
    assert comparison.seconds == pytest.approx(0.825)
    assert comparison.seconds_to_end == pytest.approx(0.025)
    work, predicted, waiting, between, off_plan, outside = comparison.stage(1)
    assert (work, predicted) == (pytest.approx(0.4), pytest.approx(0.3))
    assert (waiting, between, off_plan) == (pytest.approx(0.1), pytest.approx(0.025), 0.0)
    assert outside == pytest.approx(0.825 - 0.525)
    assert comparison.stage(0).outside == pytest.approx(0.0, abs=1e-9)


def test_kinds_of_actions_are_compared_without_their_waiting():
    forward, backward = small().comparison.kinds()
    assert forward == KindTimes("F", 2, pytest.approx(0.1), pytest.approx(0.1), pytest.approx(1.0))
    assert backward == KindTimes("B", 2, pytest.approx(0.3), pytest.approx(0.2), pytest.approx(1.5))


def test_a_plan_without_costs_has_no_ratios():
    timeline = small(plan=replace(small().plan, times=(((0.0, 0.0),) * 2,) * 2))
    assert [kind.ratio for kind in timeline.comparison.kinds()] == [None, None]
    assert "took 825 ms on 2 stages.\n" in str(timeline)
    Page(timeline.to_html())


def test_what_a_stage_did_off_its_plan_is_told_apart():
    comparison = off_plan().comparison
    assert comparison.left_plan == [1]
    assert comparison.missing(0) == []
    assert comparison.missing(1) == [BACKWARD]
    found = comparison.stage(1)
    assert found.off_plan == pytest.approx(0.4)
    assert (found.work, found.predicted) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_stage_without_actions_is_outside_of_the_step_all_the_time():
    plan = Plan(stages=((FORWARD,), ()), times=(((0.0, 1.0),), ()))
    recordings = (Recording((Span(FORWARD, 0.0, 2.0, 0.0),), 2.0), Recording((), 0.5))
    assert Comparison(plan, recordings).stage(1) == (0, 0, 0, 0, 0, 2.0)
    Page(small(plan=plan, stages=recordings).to_html())


# --- text -----------------------------------------------------------------------------------------------------------


def test_what_took_several_times_as_long_is_told_as_a_factor():
    recording = Recording((Span(FORWARD, 0.0, 1.0, 0.0), Span(BACKWARD, 1.0, 312.0, 0.0)), 312.0)
    lines = str(small(stages=(recording, recording))).splitlines()
    assert lines[0] == "Training step 7 took 312 s on 2 stages, 520 times the 600 ms that were predicted."


def test_the_text_says_what_the_step_took_and_where():
    lines = str(small()).splitlines()
    assert lines[0] == "Training step 7 took 825 ms on 2 stages, 38% longer than the 600 ms that were predicted."
    assert lines[1] == "It took 25 ms more until the stages had agreed and shared their results."
    measured, predicted = lines[3:5]
    assert measured.startswith("stage 0   measured  FFF")
    assert predicted.startswith("          predicted FFF")
    assert measured.count("B") == pytest.approx(98 * 0.3 / 0.825, abs=1)
    assert measured.count("·") == pytest.approx(98 * 0.4 / 0.825, abs=1)
    (row,) = [line for line in lines if line.startswith("│ 1 ")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("1", "4", "400 ms", "300 ms", "1.33", "100 ms", "25 ms", "300 ms")
    ]
    (row,) = [line for line in lines if "backward" in line]
    assert row.split("│")[-2].strip() == "1.50"


def test_the_text_of_a_step_as_planned_has_the_same_lanes_twice():
    lines = str(as_planned()).splitlines()
    lanes = [line[20:] for line in lines if line[10:19] in {"measured ", "predicted"}]
    assert len(lanes) == 6
    assert lanes[::2] == lanes[1::2]
    assert "F" in lanes[0]
    assert "f" in lanes[0], "neighbouring microbatches can be told apart"


def test_a_step_that_has_left_its_plan_says_what_is_missing():
    text = str(off_plan())
    assert (
        "Stage 1 has left its plan, because a microbatch took another path than the plan was made for. 1 of its" in text
    )
    assert "missing, since they never ran as such: B0." in text
    assert "~~~~" in text
    assert "off the plan" in Page(off_plan().to_html()).words


# --- the trace ------------------------------------------------------------------------------------------------------


def events_of(timeline: Timeline, *only: int) -> list[dict]:
    data = json.loads(timeline.to_json(only or None))
    assert data["displayTimeUnit"] == "ms"
    return data["traceEvents"]


@pytest.mark.parametrize("timeline", [small(), off_plan(), as_planned("zb-h1")], ids=["small", "off plan", "zb-h1"])
def test_the_trace_has_the_events_of_the_published_format(timeline):
    events = events_of(timeline)
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        else:
            key = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert list(event["args"]) == [key]


@pytest.mark.parametrize("timeline", [small(), off_plan(), as_planned("zb-h1")], ids=["small", "off plan", "zb-h1"])
def test_slices_of_a_row_lie_inside_of_each_other_or_apart(timeline):
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events_of(timeline):
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 2 * len(timeline.ranks)
    for slices in rows.values():
        open_until: list[float] = []
        for start, end in slices:
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def test_a_rank_is_a_process_with_what_was_measured_over_what_was_predicted():
    events = events_of(small())
    named = {(each["name"], each["pid"], each["tid"]): each["args"] for each in events if each["ph"] == "M"}
    assert named["process_name", 6, 6] == {"name": "stage 0 (rank 5)"}
    assert named["process_sort_index", 5, 5] == {"sort_index": 1}
    assert named["thread_name", 5, 5] == {"name": "measured"}
    assert named["thread_name", 5, 1_000_005] == {"name": "predicted"}
    slices = [
        (each["name"], each["tid"], each["ts"], each["dur"]) for each in events if each["pid"] == 5 and "ts" in each
    ]
    assert slices == [
        ("F0", 5, 0.0, 200_000.0),
        ("waiting", 5, 0.0, 100_000.0),
        ("B0", 5, 225_000.0, 300_000.0),
        ("F0", 1_000_005, 100_000.0, 100_000.0),
        ("B0", 1_000_005, 200_000.0, 200_000.0),
    ]


def test_an_action_of_the_trace_knows_its_microbatch_and_its_prediction():
    (action,) = [each for each in events_of(small(), 5) if each["name"] == "B0" and each["cat"] == "measured"]
    assert action["args"] == {
        "microbatch": 0,
        "segment": 0,
        "work_us": 300_000.0,
        "waited_us": 400_000.0,
        "predicted_start_us": 400_000.0,
        "predicted_us": 200_000.0,
    }


def test_a_rank_can_have_a_trace_of_its_own():
    assert {event["pid"] for event in events_of(small(), 4)} == {5}
    assert {event["pid"] for event in events_of(small())} == {5, 6}


def test_all_actions_of_the_plan_are_in_the_trace_by_name():
    timeline = as_planned("zb-h1")
    planned = sorted(str(action) for actions in timeline.plan.stages for action in actions)
    for category in ("measured", "predicted"):
        assert sorted(each["name"] for each in events_of(timeline) if each.get("cat") == category) == planned


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1"])
def test_the_page_draws_every_action_twice(policy):
    timeline = as_planned(policy)
    drawn = [kind for kind in Page(timeline.to_html()).rectangles if kind in {"F", "B", "I", "W"}]
    planned = [action.kind for actions in timeline.plan.stages for action in actions]
    assert sorted(drawn) == sorted(planned * 2)


def test_waiting_is_drawn_as_such_and_the_ends_of_the_step_are_marked():
    html = small().to_html()
    assert sorted(kind for kind in Page(html).rectangles if kind.endswith("waiting")) == ["B waiting", "F waiting"]
    assert html.count('class="end"') == 1
    assert html.count('class="end then"') == 1
    assert "B0: 125 ms to 825 ms, 400 ms of it waiting" in html


@pytest.mark.parametrize("scale", [1e-6, 3e-4, 0.01, 7.0])
def test_the_axis_has_a_handful_of_round_marks(scale):
    words = Page(as_planned(scale=scale).to_html()).words
    marks = words[words.index("0") :][: words.index("stage 0") - words.index("0")]
    assert 5 <= len(marks) <= 10
    assert len({len(mark) for mark in marks}) <= 4, "no long fractions"


def test_the_page_loads_nothing_and_runs_nothing():
    html = off_plan().to_html()
    assert not any(word in html for word in ("<script", "src=", "href=", "@import", "url("))


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_ending_of_a_file_says_the_form(tmp_path):
    for name, begin in (("a.txt", "Training step 7"), ("b.json", '{"traceEvents"'), ("deeper/c.html", "<!doctype")):
        small().save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(begin)
    with pytest.raises(ConfigError, match=r"'d\.pdf'. Change its ending"):
        small(rank=1).save(tmp_path / "d.pdf")


def test_only_global_rank_0_writes(tmp_path):
    small(rank=1).save(tmp_path / "a" / "b.html")
    assert list(tmp_path.iterdir()) == []
