"""Orders of actions as data."""

import pytest

from smp_strategy.pipeline.action_order import begun_early, peak_microbatches
from smp_strategy.pipeline.schedule import Action


def order(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@pytest.mark.parametrize(
    ("text", "peak"),
    [("", 0), ("F0 B0 F1 B1", 1), ("F0 F1 B0 B1", 2), ("F0 F1 F0.1 B0.1 B0 F2 B1", 2), ("F0 F1 F2", 1)],
)
def test_a_microbatch_is_kept_from_its_first_action_to_its_last(text, peak):
    assert peak_microbatches(order(text)) == peak


@pytest.mark.parametrize(
    ("text", "early"),
    [
        ("", []),
        ("F0 F1 F2 B0 B1 B2", [(), (), (), (), (), ()]),
        ("F0 F1 B0 F2 B1 B2", [(), (2,), (), (), (), ()]),
        ("F0 B0 F1 B1 F2 B2", [(1,), (), (2,), (), (), ()]),
        ("F0 I0 W0 F1", [(1,), (1,), (), ()]),
        ("F0 F1 F2 F0.1 F1.1 F2.1 B0.1", [(1, 2), (2, 0), (), (), (), (), ()]),
        ("F0 F1 F0.1 B0.1 F1.1", [(1, 0), (), (1,), (), ()]),
    ],
)
def test_the_next_microbatch_begins_early_where_none_ends_meanwhile(text, early):
    assert begun_early(order(text)) == early
