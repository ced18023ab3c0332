"""Memory of flat buffers and of the turns of units, against counting them one by one."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.data_parallel.flat_layout import BLOCK_BYTES, FlatParameter, UnitLayout
from smp_strategy.planning.memory.sharded import Turn, flat_groups, most_gathered, most_unreduced, share_of, turns_of
from smp_strategy.planning.partition.problem import HeldBytes

SIZES = {"float32": 4, "bfloat16": 2, "float64": 8}
# Two moments and a counter.
ADAM = 4


@st.composite
def entries(draw: st.DrawFn) -> FlatParameter:
    dtype = draw(st.sampled_from(list(SIZES)))
    numel = draw(st.integers(0, 400))
    is_widened = SIZES[dtype] < 4 and draw(st.booleans())
    return FlatParameter(
        names=("w",),
        shape=(numel,),
        stride=(1,),
        dtype=dtype,
        itemsize=SIZES[dtype],
        requires_grad=draw(st.booleans()),
        gradient_dtype="float32" if is_widened else dtype,
        gradient_itemsize=4 if is_widened else SIZES[dtype],
    )


def state_bytes(entry: FlatParameter, numel: int) -> int:
    return 2 * numel * entry.itemsize + ADAM


def layout(*numels: int, degree: int = 2, trained: bool = True) -> UnitLayout:
    """Of float32, without padding where the numbers are multiples of 32 times the degree."""
    return UnitLayout.of(
        [
            FlatParameter(names=("w",), shape=(n,), stride=(1,), dtype="float32", itemsize=4, requires_grad=trained)
            for n in numels
        ],
        degree,
    )


@given(st.lists(entries(), max_size=6), st.integers(1, 5), st.sampled_from([0, 50, 1000]))
def test_shares_add_up_to_the_whole_and_some_padding(parameters, degree, threshold):
    found = UnitLayout.of(parameters, degree, threshold)
    share = share_of(found, state_bytes, gathers_once=True, reduces_early=False)
    padding = BLOCK_BYTES * (len(parameters) + degree * len(found.flats))
    stays = [entry for entry in parameters if entry.numel < threshold]
    trained = sum(entry.numel * entry.itemsize for entry in parameters if entry.requires_grad)
    kept = sum(entry.numel * entry.itemsize for entry in stays)
    cut = sum(entry.numel * entry.itemsize for entry in parameters) - kept
    assert cut + degree * kept <= degree * share.parameter <= cut + degree * kept + degree * padding
    gradients = sum(entry.numel * entry.gradient_itemsize for entry in parameters if entry.requires_grad)
    assert gradients <= degree * share.gradient <= gradients + 2 * padding
    assert cut <= share.gathered <= cut + padding
    assert gradients <= share.unreduced <= gradients + 2 * padding
    num_trained = sum(entry.requires_grad for entry in parameters)
    assert 2 * trained / degree + ADAM * num_trained <= share.optimizer <= 2 * share.gradient + ADAM * num_trained
    at_rest = share_of(found, state_bytes, gathers_once=False, reduces_early=True)
    assert at_rest == HeldBytes(share.parameter, share.gradient, share.optimizer)


@given(st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(0, 9), max_size=5)))
def test_every_parameter_is_in_the_group_of_the_units_that_use_it(parameters):
    groups = flat_groups(parameters)
    everything = {number for mine in parameters.values() for number in mine}
    assert sorted(number for group in groups for number in group.parameters) == sorted(everything)
    for group in groups:
        for number in group.parameters:
            assert group.users == tuple(name for name, mine in parameters.items() if number in mine)
    assert len({group.users for group in groups}) == len(groups)


# `f` is frozen.
UNITS = {"a": layout(64), "b": layout(128), "c": layout(256), "f": layout(512, trained=False), "s": layout(64)}
USES = st.lists(st.lists(st.sampled_from(list(UNITS)), max_size=2, unique=True), max_size=8)


def gathered_one_by_one(uses: Sequence[Sequence[str]], most_live: int | None) -> int:
    """Forward and back, with the next one gathered where there is room."""
    order = [use for use in uses if use]
    peak = 0
    for run in (order, order[::-1]):
        for now, ahead in zip(run, [*run[1:], []], strict=False):
            live = set(now)
            if most_live is None or sum(UNITS[key].transient_numel for key in live | set(ahead)) <= most_live:
                live |= set(ahead)
            peak = max(peak, sum(UNITS[key].full_bytes for key in live))
    return peak


@given(USES, st.none() | st.integers(0, 2000))
def test_the_most_that_is_gathered_is_that_of_a_walk_forward_and_back(uses, most_live):
    assert most_gathered(uses, UNITS, most_live) == gathered_one_by_one(uses, most_live)


@pytest.mark.parametrize(
    ("uses", "most"),
    [
        ("abc", 64 + 128 + 256),
        ("aabbcc", 64 + 128 + 256),
        ("abca", 64 + 128 + 256),  # `a` is through at the very end, and has its gradient all the time
        ("afsb", 64 + 64 + 128),
        ("f", 0),
        ("", 0),
    ],
)
def test_gradients_are_whole_until_they_are_reduced(uses, most):
    assert most_unreduced(uses, UNITS, 2) == 4 * most


def test_only_the_last_few_are_still_being_reduced():
    units = {str(number): layout(64) for number in range(9)}
    order = list(units)
    for most_reducing in range(4):
        assert most_unreduced(order, units, most_reducing) == 4 * 64 * (1 + most_reducing)
    # Both ways through the first unit end together.
    assert most_unreduced([*order, "0"], units, 2) == 4 * 64 * 4


@given(USES, st.integers(0, 3))
def test_whole_gradients_are_at_least_those_of_the_largest_use_and_at_most_all(uses, most_reducing):
    found = most_unreduced(uses, UNITS, most_reducing)
    gradients = {key: 0 if key == "f" else UNITS[key].full_bytes for key in UNITS}
    assert found >= max((sum(gradients[key] for key in use) for use in uses), default=0)
    assert found <= sum(gradients[key] for key in {key for use in uses for key in use})
    assert found <= most_unreduced(uses, UNITS, most_reducing + 1)


def test_a_turn_is_fullest_in_the_backward_of_its_call_or_when_its_gradients_are_copied():
    units = {"a": layout(64), "b": layout(128)}
    first, last = turns_of(["a", "b"], units, most_reducing=2)
    assert first == Turn(gathered=4 * 64, after=0, own=4 * 64, reducing=4 * 128)
    assert last == Turn(gathered=4 * (64 + 128), after=4 * 64, own=4 * 128, reducing=0)
    assert first.beside(working=1000, saved=100) == 1000 + 256 + 512
    assert first.beside(working=0, saved=100) == 2 * 256 - 100 + 512
