"""Does `make test` find faults? ``python -m tests.mutations`` puts ten into copies of the package, one after the other.

Each is the smallest form of a fault that a parallel engine can have. The day's tests run on the copy until one fails,
those near the fault first; the table that is printed names it, and the minutes until then. Arguments choose faults by
their names.
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

from tests.grids import day_of_commit

__all__ = ["MUTATIONS", "Mutation", "mutated"]

ROOT = Path(__file__).parents[1]
EVERYTHING = ("tests", "--ignore=tests/programs", "--ignore=tests/architecture")


class Mutation(NamedTuple):
    """A fault: ``right``, which occurs once in ``file``, becomes ``wrong``."""

    name: str
    file: str
    right: str
    wrong: str
    near: tuple[str, ...]
    """Test files that run first."""


MUTATIONS = [
    Mutation(
        "a sign in a gradient sum",
        "data_parallel/bucketed_all_reduce.py",
        "            total.add_(other)\n",
        "            total.sub_(other)\n",
        ("tests/ranks/test_state_sharding.py", "tests/ranks/test_sums.py"),
    ),
    Mutation(
        "a wrong stage in the router",
        "pipeline/routing.py",
        "newest = max(value.id for value in pulling)",
        "newest = min(value.id for value in pulling)",
        ("tests/unit/pipeline/test_routing.py", "tests/parity/test_sequence_models.py"),
    ),
    Mutation(
        "a lost microbatch",
        "engine/run_step.py",
        "else [size / total for size in sizes]",
        "else [size / total if number else 0.0 for number, size in enumerate(sizes)]",
        ("tests/unit/engine/test_run_step.py", "tests/parity/test_pipeline.py"),
    ),
    Mutation(
        "a skipped digest",
        "distributed/agreement/ledger.py",
        "return len({digest for digest, *_ in found}) == 1",
        "return True",
        ("tests/ranks/test_agreement.py", "tests/ranks/test_watch.py"),
    ),
    Mutation(
        "a wrong dtype of the norm",
        "data_parallel/grad_norm.py",
        "    dtype = functools.reduce(torch.promote_types, dtypes)\n",
        "    dtype = functools.reduce(lambda one, other: torch.bfloat16, dtypes)\n",
        ("tests/ranks/test_global_norm.py", "tests/ranks/test_state.py"),
    ),
    Mutation(
        "an all-gather too early",
        "data_parallel/gather_schedule.py",
        "        began = perf_counter()\n        self._units[number].wait()\n",
        "        began = perf_counter()\n",
        ("tests/ranks/test_sharded_engine.py", "tests/parity/test_sharded.py"),
    ),
    Mutation(
        "a swallowed error",
        "distributed/failure.py",
        '            set_first = store.compare_set(_key(run), "", f"rank {rank} failed first: {text}").decode()\n',
        '            set_first = f"rank {rank} failed first: {text}"\n',
        ("tests/unit/distributed/test_failure.py", "tests/integrations/test_lightning_launch.py"),
    ),
    Mutation(
        "a hang without a watch",
        "distributed/deadlock.py",
        "    alive.look()\n",
        "    alive.close\n",
        ("tests/ranks/test_watch.py", "tests/ranks/test_waiting.py"),
    ),
    Mutation(
        "a wrong RNG state",
        "distributed/rng_state.py",
        "        random.setstate(state.python)\n",
        "        random.getstate()\n",
        ("tests/unit/distributed/test_rng_state.py",),
    ),
    Mutation(
        "a checkpoint without one tensor",
        "checkpoint/spread_state.py",
        "        mine = {name: EntryOffer.of(value) for name, value in state.items()}\n",
        "        mine = {name: EntryOffer.of(value) for name, value in list(state.items())[1:]}\n",
        ("tests/parity/test_pipeline.py",),
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
    """The test that fails first on a copy with the fault, or "none", and the minutes until then.

    Those of the day's tests run first that lie near the fault, then all.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "build", "outputs", "*.egg-info")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        file = copy / "smp_strategy" / mutation.file
        file.write_text(mutated(file.read_text(), mutation))
        # The copy goes before an installed package, also in processes that tests start.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "examples")])}
        began = time.monotonic()
        for paths in (mutation.near, EVERYTHING):
            told = subprocess.run(
                [sys.executable, "-m", "pytest", "-n3", "--dist=worksteal", "--sparse", f"--day={day}", "-x", "-q"]
                + ["-p", "no:cacheprovider", *paths],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
            if found is not None:
                break
        minutes = (time.monotonic() - began) / 60
    return found[1] if found else "none", minutes


def main() -> None:
    """Print the table, in Markdown; the exit status is the number of faults that no test has found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults, by their names; default: all")
    parser.add_argument("--day", type=int, default=day_of_commit(), help="run the cases of this day")
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
