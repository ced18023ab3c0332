"""Does `make test` find faults? ``python -m tests.mutations`` puts ten into copies of the package, one after the other.

Each is the smallest form of a fault that a parallel engine can have. The suite runs on the copy until a test fails; the
table that is printed names it, and the minutes until then. Arguments choose faults by their names.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.grids import today

__all__ = ["MUTATIONS", "Mutation", "mutated"]

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A fault: ``right``, which occurs once in ``file``, becomes ``wrong``."""

    name: str
    file: str
    right: str
    wrong: str


MUTATIONS = [
    Mutation(
        "a sign in a gradient sum",
        "data_parallel/bucketed_all_reduce.py",
        "            total.add_(other)\n",
        "            total.sub_(other)\n",
    ),
    Mutation(
        "a wrong stage in the router",
        "pipeline/routing.py",
        "newest = max(pulling, key=_number)",
        "newest = min(pulling, key=_number)",
    ),
    Mutation(
        "a lost microbatch",
        "engine/run_step.py",
        "else [size / total for size in sizes]",
        "else [size / total if number else 0.0 for number, size in enumerate(sizes)]",
    ),
    Mutation(
        "a skipped digest",
        "pipeline/agreement.py",
        "return compared.is_done() and all(torch.equal(mine, other) for other in found)",
        "return compared.is_done()",
    ),
    Mutation(
        "a wrong dtype of the norm",
        "data_parallel/grad_norm.py",
        "    dtype = functools.reduce(torch.promote_types, dtypes)\n",
        "    dtype = functools.reduce(lambda one, other: torch.bfloat16, dtypes)\n",
    ),
    Mutation(
        "an all-gather too early",
        "data_parallel/gather_schedule.py",
        "        self._prefetch()\n        self._units[number].wait()\n",
        "        self._prefetch()\n",
    ),
    Mutation(
        "a swallowed error",
        "integrations/lightning/strategy.py",
        "        end_as_stopped(exception, self.tree)\n        publish_own(exception)\n",
        "        end_as_stopped(exception, self.tree)\n",
    ),
    Mutation(
        "a hang without a watch",
        "distributed/deadlock.py",
        "    while not stop.wait(PAUSE_SECONDS):\n",
        "    while False and not stop.wait(PAUSE_SECONDS):\n",
    ),
    Mutation(
        "a wrong RNG state",
        "distributed/rng_state.py",
        "        random.setstate(state.python)\n",
        "        random.getstate()\n",
    ),
    Mutation(
        "a checkpoint without one tensor",
        "checkpoint/full_state_dict.py",
        "    mine = {name: offer_of(value) for name, value in state.items()}\n",
        "    mine = {name: offer_of(value) for name, value in list(state.items())[1:]}\n",
    ),
]


def mutated(text: str, mutation: Mutation) -> str:
    """``text`` with the fault.

    Raises:
        ValueError: The code has changed: its right form does not occur exactly once.
    """
    if text.count(mutation.right) != 1:
        raise ValueError(f"{mutation.file} has {mutation.right!r} {text.count(mutation.right)} times instead of once.")
    return text.replace(mutation.right, mutation.wrong)


def first_failure(mutation: Mutation, day: int) -> tuple[str, float]:
    """The test that fails first on a copy with the fault, or "none", and the minutes until then."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "build", "outputs", "*.egg-info")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        file = copy / "smp_strategy" / mutation.file
        file.write_text(mutated(file.read_text(), mutation))
        # The copy goes before an installed package, also in processes that tests start.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "examples")])}
        began = time.monotonic()
        told = subprocess.run(
            [sys.executable, "-m", "pytest", "-n3", "--dist=worksteal", "--sparse", f"--day={day}", "-x", "-q"]
            + ["-p", "no:cacheprovider", "tests", "--ignore=tests/programs", "--ignore=tests/architecture"],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        minutes = (time.monotonic() - began) / 60
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    return found[1] if found else "none", minutes


def main() -> None:
    """Print the table, in Markdown; the exit status is the number of faults that no test has found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults, by their names; default: all")
    parser.add_argument("--day", type=int, default=today(), help="run the cases of this day")
    arguments = parser.parse_args()
    print("| fault | found by | minutes |\n|---|---|---|", flush=True)
    missed = 0
    for mutation in MUTATIONS:
        if arguments.names and mutation.name not in arguments.names:
            continue
        test, minutes = first_failure(mutation, arguments.day)
        missed += test == "none"
        print(f"| {mutation.name} | `{test}` | {minutes:.1f} |", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
