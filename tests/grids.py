"""Which cases of a grid are enough for every day.

A test with several parameters has as many cases as the product of their values, most of which can only fail together
with others. ``pytest --sparse`` (that is ``make test``) runs so few that each value of each parameter occurs, together
with values that have not occurred yet as far as possible; ``make test-all`` runs all of them. If more than
``LONGEST`` remain, it runs that many at equal distances, and leaves the other values to ``make test-all``.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["LONGEST", "enough", "spaced"]

# Cases of one test that are enough for every day.
LONGEST = 8


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
