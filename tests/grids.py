"""Which cases of a test run in a day.

A test with several parameters has as many cases as the product of their values, most of which can only fail together
with others. ``pytest --sparse`` (that is ``make test``) runs every n-th case of a test, as a Latin square does: the
next test begins with the next case, and so does the next day. So a run has every layout with some tests of each file,
and every case has run after n days. In the folders of ``DAYS``, whose tests start ranks, n is the number of the test's
cases times that of the folder: of 3, every third test of a file runs, with one case. ``@pytest.mark.daily``, on the
tests that find the faults of :mod:`tests.mutations`, says that one case runs every day, ``@pytest.mark.one_in(n)`` says
another number, and ``@pytest.mark.dear``, on tests that cost several seconds, doubles it.

The day is that of the last commit: a commit has the same cases on every machine and on every date. ``--day`` repeats
the choice of another day, ``make test-all`` runs all cases.
"""

import subprocess
from datetime import date
from pathlib import Path

__all__ = ["DAYS", "day_of_commit", "runs_today"]

# By the folder of a test, on one of how many days it runs.
DAYS = {"parity": 1, "examples": 1, "ranks": 3, "integrations": 3}


def day_of_commit(folder: Path = Path(__file__).parent) -> int:
    """The number of the day of the last commit of the repository around ``folder``; where there is none, of today."""
    command = ["git", "log", "-1", "--format=%cs"]
    try:
        written = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return date.today().toordinal()
    return date.fromisoformat(written.strip()).toordinal()


def runs_today(case: int, every: int, start: int) -> bool:
    """Whether a case runs.

    Args:
        case: number of the case in its test.
        every: one of so many cases in a row runs.
        start: number of the day plus that of the test.
    """
    return (start + case) % every == 0
