"""Which cases of a grid are enough for every day.

A test with several parameters has as many cases as the product of their values, most of which can only fail together
with others. ``pytest --sparse`` (that is ``make test``) runs so many that each value of each parameter occurs, and with
three parameters or more each pair of values; ``make test-all`` runs all of them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

__all__ = ["enough"]


def enough(cases: Sequence[dict[Any, Any]]) -> list[int]:
    """The numbers of the cases to run, in ascending order.

    Args:
        cases: for each case a value (its number, say) of each parameter.
    """
    strength = min(len(cases[0]), 2) if len(cases[0]) > 2 else 1
    covers = [set(combinations(sorted(case.items()), strength)) for case in cases]
    missing = set().union(*covers)
    used: Counter[Any] = Counter()
    chosen: list[int] = []
    while missing:
        # Values that have occurred less go first: nearly all cases with two stages would be a poor choice.
        worth = [
            (len(covers[number] & missing), -sum(used[item] for item in case.items()))
            for number, case in enumerate(cases)
        ]
        best = worth.index(max(worth))
        chosen.append(best)
        missing -= covers[best]
        used.update(cases[best].items())
    return sorted(chosen)
