"""Which architectures work? Runs a step of every one in the table on two stages and writes ``docs/architectures.md``.

    python -m benchmarks.architectures             # all of them, and the page
    python -m benchmarks.architectures vision      # those of a family, or named; no page

Each is compared with one process that accumulates over the same microbatches. The last line of the output is the
score, as JSON.
"""

import json
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.parity.huggingface.architecture import Architecture
from tests.parity.huggingface.compare import STAGES, Comparison, compare
from tests.parity.huggingface.table import ARCHITECTURES

__all__ = ["main"]

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
INTRODUCTION = """# Hugging Face architectures

{score}

Each row is an unchanged tiny random model of Transformers {version} with the step `model(**batch).loss`, apart from its
remark. `python -m benchmarks.architectures` runs one optimizer step on {stages} stages with two microbatches, compares
every gradient and weight with a single process, and writes this page (tests: `tests/parity/huggingface`).

*Units* are the numbers of units of each stage. *Difference* is relative to the largest element of the tensor that
differs most. It is zero, except if weights are tied across stages or a unit runs more than once: then sums have another
order.

| family | model | units | difference | remark |
|---|---|---|---|---|
"""
# Exceptions in the output of a rank, without those that only say that another rank has failed.
_ERROR = re.compile(r"^(?:[\w.]+\.)?(?!PeerFailedError)(\w*(?:Error|Exception): .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """An architecture and what became of it."""

    architecture: Architecture
    comparison: Comparison | None
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it has the numbers of one process."""
        return self.comparison is not None and self.comparison.is_right

    def __str__(self) -> str:
        units, difference = "", "**fails**"
        if self.comparison is not None:
            units = " + ".join(map(str, self.comparison.stages))
            difference = f"{self.comparison.difference:.0e}" if self.comparison.difference else "0"
            difference = difference if self.is_right else f"**{difference}**"
        remark = self.architecture.note or self.error.replace("|", "\\|")
        return f"| {self.architecture.family} | {self.architecture.name} | {units} | {difference} | {remark} |"


def main(chosen: list[str]) -> None:
    """Run the architectures whose family or name is among ``chosen``; all of them if it is empty."""
    torch.set_num_threads(1)  # ranks are forked, which hangs after torch has computed with several threads
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows = [_run(a) for a in ARCHITECTURES if not chosen or {a.family, a.name} & set(chosen)]
    numbers = Counter(row.architecture.family for row in rows)
    right = Counter(row.architecture.family for row in rows if row.is_right)
    families = {family: f"{right[family]}/{number}" for family, number in numbers.items()}
    score = {
        "architectures": len(rows),
        "right": sum(right.values()),
        "bit_identical": sum(row.is_right and row.comparison.difference == 0 for row in rows if row.comparison),
        "families": families,
        "seconds": round(time.perf_counter() - start),
    }
    if not chosen:
        summary = (
            f"{score['right']} of {score['architectures']} have the numbers of one process, "
            f"{score['bit_identical']} of them bit by bit: "
            + ", ".join(f"{family} {share}" for family, share in families.items())
            + "."
        )
        text = INTRODUCTION.format(version=transformers.__version__, stages=STAGES, score=summary)
        PAGE.write_text(text + "\n".join(map(str, rows)) + "\n")
    print(json.dumps(score))


def _run(architecture: Architecture) -> Row:
    try:
        row = Row(architecture, compare(architecture))
    except Exception as error:
        found = [line for line in _ERROR.findall(str(error)) if "gloo" not in line]
        row = Row(architecture, None, found[-1] if found else f"{type(error).__name__}: {error}"[:300])
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
