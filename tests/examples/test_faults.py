"""A run with a fault at a random moment ends with the cause, or trains to the bits of the undisturbed run."""

import os
import shutil

import pytest

from benchmarks.faults import ANY_TIME, AtRandom, Fault, Seen

# Seeds whose runs differ in rank, moment, launcher and layout; one of these cases runs a day.
CASES = [(name, seed) for seed, name in enumerate([*ANY_TIME, "kill", "raise-any", "full-disk"], 1)]
NEEDS_ROOT = {"full-disk": "unshare", "full-shm": "unshare", "drop-link": "ip"}


FAULT = Fault(kind="kill", rank=1, said=r"rank 1 .*was killed by SIGKILL")
CAUSE = "[rank0]: smp_strategy.errors.PeerFailedError: rank 1 failed first: its process (9) was killed by SIGKILL"
ANY_RUN = """GPU available: False, used: False
Process mesh: 2 ranks = pp 2 x dp 1
A step takes 397 us predicted (forward and backward).
More: `smp_report=full`; less: `smp_report=quiet`.
W1130 23:23:26.617000 26439 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 2 closing signal
"""
TABLE = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
Root Cause (first observed failure):
[0]:
  rank      : {} (local_rank: {})
  exitcode  : -9 (pid: 9)  (SIGKILL)
"""


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (f"{CAUSE}\nRuntimeError: something else", True),
        (f"RuntimeError: something else\n{CAUSE}", False),
        (f'[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py", line 1, in f\n{CAUSE}', True),
        (TABLE.format(1, 1), True),
        (TABLE.format(0, 0), False),
        (f"RuntimeError: something else\n{TABLE.format(1, 1)}", False),
        ("", False),
    ],
)
def test_the_first_line_about_a_failure_names_its_cause_or_not(told, expected):
    assert Seen(seconds=1.0, code=1, told=ANY_RUN + told).names(FAULT) == expected


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_run_ends_with_the_cause_or_goes_on(name, seed):
    if name in NEEDS_ROOT and (os.geteuid() != 0 or not shutil.which(NEEDS_ROOT[name])):
        pytest.skip(f"needs root and {NEEDS_ROOT[name]}")
    draw, seen, problems = AtRandom(seed, [name]).once()
    assert not problems, f"{draw}: {problems}\n{seen.told}"
