"""Clock synchronization of recordings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.pipeline.recording import Recording, Span
from smp_strategy.pipeline.schedule import Action
from smp_strategy.reports.timeline.clocks import Exchange, aligned, offset_of

seconds = st.floats(0.0, 0.1)


def exchange(asked: float, there: float, back: float, skew: float) -> Exchange:
    return Exchange(asked, asked + there + skew, asked + there + back)


@given(st.floats(-1e6, 1e6).filter(lambda skew: abs(skew) > 1.0), st.lists(st.tuples(seconds, seconds), min_size=1))
def test_an_offset_is_wrong_by_half_of_the_quickest_exchange_at_most(skew, delays):
    found = offset_of([exchange(float(asked), there, back, skew) for asked, (there, back) in enumerate(delays)])
    quickest = min(there + back for there, back in delays)
    assert abs(found - skew) <= quickest / 2 + 1e-8


@given(st.lists(st.tuples(seconds, seconds), min_size=1))
def test_one_clock_that_two_ranks_share_has_no_offset(delays):
    assert offset_of([exchange(float(asked), there, back, 0.0) for asked, (there, back) in enumerate(delays)]) == 0.0


def test_equal_delays_give_the_offset_exactly():
    slow_answer, even = exchange(0.0, 0.25, 0.5, 100.0), exchange(8.0, 0.125, 0.125, 100.0)
    assert offset_of([slow_answer, even]) == 100.0


def recording(start: float, waited: float, end: float, skew: float) -> Recording:
    return Recording((Span(Action("F", 0), start + skew, end + skew, waited),), end + 1 + skew)


def test_recordings_by_one_clock_begin_when_the_first_stage_works():
    first, second = aligned([recording(4, 0, 6, 0), recording(5, 1, 7, 1000)], [0.0, 1000.0])
    assert first == Recording((Span(Action("F", 0), 0.0, 2.0, 0.0),), 3.0)
    assert second == Recording((Span(Action("F", 0), 1.0, 3.0, 1.0),), 4.0)


def test_what_a_stage_waits_for_the_first_one_to_come_is_no_part_of_the_step():
    first, second = aligned([recording(4, 0, 6, 0), recording(1, 5, 7, 0)], [0.0, 0.0])
    assert first.spans[0].start == 0.0
    assert second.spans[0] == Span(Action("F", 0), 0.0, 3.0, 2.0)
    assert second.spans[0].work == pytest.approx(1.0)
