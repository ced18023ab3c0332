"""Which cases of a test run today.

A test with several parameters has as many cases as the product of their values, most of which can only fail together
with others. ``pytest --sparse`` (that is ``make test``) runs every n-th case of a test, as a Latin square does: the
next test begins with the next case, and so does the next day. So a run has every layout with some tests of each file,
and every case has run after n days. In the folders whose tests start ranks n is the number of the test's cases, so one
runs. ``@pytest.mark.one_in(n)`` says another number; a test without parameters runs every n-th day then. Tests
that cost several seconds have ``@pytest.mark.dear`` and run every other day of theirs.

``--day`` repeats the choice of another day, ``make test-all`` runs all cases.
"""

from datetime import date

__all__ = ["runs_today", "today"]


def today() -> int:
    """The number of this day."""
    return date.today().toordinal()


def runs_today(case: int, every: int, start: int) -> bool:
    """Whether a case runs.

    Args:
        case: number of the case in its test.
        every: one of so many cases in a row runs.
        start: number of the day plus that of the test.
    """
    return (start + case) % every == 0
