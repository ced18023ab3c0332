"""Which cases of a grid are enough for every day.

A test with several parameters has as many cases as the product of their values, most of which can only fail together
with others. ``pytest --sparse`` (that is ``make test``) chooses so few that each value of each parameter occurs,
together with values that have not occurred yet as far as possible. If more than ``MOST`` remain, it runs that many at
equal distances. ``make test-all`` runs all of them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["MOST", "enough", "spaced"]

# By the folder of a test, how many of its cases are enough for every day. Those of other folders take milliseconds.
MOST = {"parity": 2, "ranks": 2, "integrations": 2, "examples": 2}


def enough(cases: Sequence[dict[Any, Any]]) -> list[int]:
    """The numbers of the cases to run, in ascending order.

    Args:
        cases: for each case a value (its number, say) of each parameter.
    """
    missing = {item for case in cases for item in case.items()}
    used: Counter[Any] = Counter()
    chosen: list[int] = []
    while missing:
        # Values that have occurred less go first: nearly all cases with two stages would be a poor choice.
        worth = [(len(missing.intersection(case.items())), -sum(used[item] for item in case.items())) for case in cases]
        best = worth.index(max(worth))
        chosen.append(best)
        missing -= cases[best].items()
        used.update(cases[best].items())
    return sorted(chosen)


def spaced(count: int, most: int) -> list[int]:
    """The numbers of at most ``most`` out of ``count`` cases, at equal distances, the first among them."""
    return list(range(count)) if count <= most else [number * count // most for number in range(most)]
