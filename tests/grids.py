"""Which cases of a grid run today.

A test with several parameters has as many cases as the product of their values, most of which can only fail together
with others. ``pytest --sparse`` (that is ``make test``) runs ``MOST`` cases of each test in the folders below, as a
Latin square does: neighbouring tests take neighbouring cases, and the next day each takes the next one. So each run
has every layout with some tests of every file, and every case has run after a few days. ``--day`` repeats the choice of
another day, ``make test-all`` runs all cases.
"""

from datetime import date

__all__ = ["MOST", "of_today", "today"]

# By the folder of a test, how many of its cases run in a day. Those of other folders take milliseconds.
MOST = {"parity": 1, "ranks": 1, "integrations": 1, "examples": 1}


def today() -> int:
    """The number of this day."""
    return date.today().toordinal()


def of_today(count: int, most: int, start: int) -> list[int]:
    """The numbers of the at most ``most`` cases, out of ``count``, that run today, at equal distances, in order.

    Args:
        count: number of cases of the test.
        most: number of cases to run.
        start: number of the day and of the test together; each number moves the choice on by one case.
    """
    if count <= most:
        return list(range(count))
    return sorted((start + number * count // most) % count for number in range(most))
