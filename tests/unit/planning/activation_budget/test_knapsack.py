"""Multiple-choice knapsack, against brute force."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.planning.activation_budget import knapsack as budget
from smp_strategy.planning.activation_budget.knapsack import Alternative, MemoryBudget, MemoryUse, bill, choose

KEEP = Alternative(0.0, (MemoryUse(around=20, before=10),))
AGAIN = Alternative(1.0, (MemoryUse(around=2, before=1, during=9),))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Alternative]], MemoryBudget]:
    """Up to five units of up to three kinds with up to four alternatives, at up to three moments."""
    num_moments = draw(st.integers(1, 3))
    small = st.integers(0, 12)
    copies = draw(st.booleans())
    loads = st.tuples(*[st.builds(MemoryUse, small, small, small)] * num_moments)
    alternatives = st.builds(Alternative, small.map(float), loads, small if copies else st.just(0))
    kinds = draw(st.lists(st.lists(alternatives, min_size=1, max_size=4), min_size=1, max_size=3))
    units = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    stock = MemoryBudget(
        most_bytes=tuple(draw(st.integers(0, 110)) for _ in range(num_moments)),
        hidden_bytes=draw(st.sampled_from([0.0, 15.0, float("inf")])),
        bytes_per_second=draw(st.sampled_from([1.0, 4.0])),
    )
    return units, stock


def peaks_of(units, chosen):
    """Bytes at each moment, from what the loads mean."""
    picked = [unit[number].loads for unit, number in zip(units, chosen, strict=True)]
    found = []
    for moment in range(len(picked[0])):
        loads = [each[moment] for each in picked]
        around = sum(load.around for load in loads)
        before = list(itertools.accumulate(load.before for load in loads))
        found.append(around + max(b + load.during for b, load in zip(before, loads, strict=True)))
    return tuple(found)


def seconds_of(units, chosen, stock):
    picked = [unit[number] for unit, number in zip(units, chosen, strict=True)]
    again, copied = sum(each.seconds for each in picked), sum(each.copied_bytes for each in picked)
    waits = max(0.0, copied - stock.hidden_bytes) / stock.bytes_per_second
    return max(again, waits) + waits


@given(problems())
def test_nothing_that_fits_is_faster(problem):
    units, stock = problem
    everything = itertools.product(*(range(len(unit)) for unit in units))
    fitting = [
        seconds_of(units, chosen, stock)
        for chosen in everything
        if all(peak <= most for peak, most in zip(peaks_of(units, chosen), stock.most_bytes, strict=True))
    ]
    verdict = choose(units, stock)
    if verdict is None:
        assert not fitting
    else:
        assert verdict.is_exact
        assert seconds_of(units, verdict.chosen, stock) == min(fitting)
        assert verdict.bill == bill(units, verdict.chosen)
        assert verdict.bill.peaks == peaks_of(units, verdict.chosen)
        assert all(peak <= most for peak, most in zip(verdict.bill.peaks, stock.most_bytes, strict=True))


@given(problems())
def test_with_rounded_bytes_the_answer_fits_all_the_same(problem):
    units, stock = problem
    before, budget.MOST_STATES = budget.MOST_STATES, 1
    try:
        verdict = choose(units, stock)
    finally:
        budget.MOST_STATES = before
    if verdict is not None:
        assert all(peak <= most for peak, most in zip(peaks_of(units, verdict.chosen), stock.most_bytes, strict=True))


def test_where_everything_fits_nothing_is_computed_again():
    verdict = choose([[KEEP, AGAIN]] * 5, MemoryBudget(most_bytes=(150,)))
    assert verdict is not None
    assert verdict.chosen == (0,) * 5


def test_the_unit_whose_return_does_not_matter_is_computed_again_first():
    # A late one comes back beside everything that is kept, an early one beside nothing.
    verdict = choose([[KEEP, AGAIN]] * 3, MemoryBudget(most_bytes=(64,)))
    assert verdict is not None
    assert verdict.chosen == (1, 0, 0)
    assert verdict.bill.peaks == (63,)


def test_many_units_that_are_alike_take_no_time():
    cheap = Alternative(0.3, (MemoryUse(around=9, before=4, during=6),))
    verdict = choose([[KEEP, cheap, AGAIN]] * 96, MemoryBudget(most_bytes=(1200,)))
    assert verdict is not None
    assert verdict.is_exact


def test_copies_that_take_longer_than_the_work_are_waited_for():
    away = Alternative(0.0, (MemoryUse(around=0, before=0, during=10),), copied_bytes=10)
    stock = MemoryBudget(most_bytes=(70,), hidden_bytes=10.0, bytes_per_second=10.0)
    verdict = choose([[KEEP, AGAIN, away]] * 4, stock)
    assert verdict is not None
    assert sorted(verdict.chosen) == [0, 0, 1, 2]
