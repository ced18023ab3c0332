"""A run with a fault at a random moment ends with the cause, or trains to the bits of the undisturbed run."""

import os
import shutil

import pytest

from benchmarks.faults import ANY_TIME, AtRandom

# Seeds whose runs differ in rank, moment, launcher and layout; one of these cases runs a day.
CASES = [*((name, 1) for name in ANY_TIME), ("kill", 2), ("raise-any", 2), ("full-disk", 2)]
NEEDS_ROOT = {"full-disk": "unshare", "full-shm": "unshare", "drop-link": "ip"}


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_run_ends_with_the_cause_or_goes_on(name, seed):
    if name in NEEDS_ROOT and (os.geteuid() != 0 or not shutil.which(NEEDS_ROOT[name])):
        pytest.skip(f"needs root and {NEEDS_ROOT[name]}")
    draw, seen, problems = AtRandom(seed, [name]).once()
    assert not problems, f"{draw}: {problems}\n{seen.told}"
