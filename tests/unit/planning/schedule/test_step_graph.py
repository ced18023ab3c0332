"""Passes of a step: split and whole backwards, and moves that keep dependencies."""

import itertools

from smp_strategy.model.trace.work import Link
from smp_strategy.planning.schedule.step_graph import ScheduledPass, StepGraph
from tests.unit.planning.schedule.flows import flow_of


def test_backwards_of_later_microbatches_are_split_and_whole_again():
    graph = StepGraph(flow_of(0, 1, 0, 1), 2, Link.instant(), 0.0)
    order = [ScheduledPass("B", segment, microbatch) for microbatch, segment in itertools.product((0, 1), (3, 1))]
    parted = graph.parted(order, num_whole=1)
    parts = [ScheduledPass(kind, segment, 1) for segment in (3, 1) for kind in ("I", "W")]
    assert parted == [*order[:2], *parts]
    assert graph.whole(graph.whole(parted, 3, 2), 1, 2) == order


def test_a_pass_overtakes_nothing_that_it_needs():
    graph = StepGraph(flow_of(0, 1), 2, Link.instant(), 0.0)
    order = [
        ScheduledPass("F", 1, 0),
        ScheduledPass("F", 1, 1),
        ScheduledPass("I", 1, 0),
        ScheduledPass("W", 1, 0),
        ScheduledPass("I", 1, 1),
    ]
    assert graph.reachable(order, 1, 4) == 3
    assert graph.reachable(order, 3, 0) == 3
    assert graph.reachable(order, 4, 0) == 3
