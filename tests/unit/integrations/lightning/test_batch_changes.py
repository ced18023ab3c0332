"""Changes of microbatches, merged into their batch."""

import pytest

from smp_strategy.integrations.lightning.steps import apply_changes, changes_of, contents_of


def applied(batch, *changes):
    """``batch`` after each of ``changes`` on a microbatch that is like it."""
    found = []
    for change in changes:
        microbatch = batch.copy()
        before = contents_of(microbatch)
        change(microbatch)
        found.append(changes_of(microbatch, before))
    apply_changes(batch, found, [1] * len(found))
    return batch


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda batch: batch.pop(), [1, 2]),
        (lambda batch: batch.append(4.0), [1, 2, 3, 4.0]),
        (lambda batch: batch.insert(0, "x"), ["x", 2, 4, 6]),  # whole numbers are counts, which add up
        (lambda batch: batch.clear(), []),
        (lambda batch: None, [1, 2, 3]),
    ],
)
def test_lists_change_as_their_parts(change, left):
    assert applied([1, 2, 3], change, change) == left


def test_mappings_change_as_their_parts():
    assert applied({"a": 1, "b": 2}, lambda each: each.pop("a"), lambda each: each.update(c="c")) == {"b": 2, "c": "c"}
