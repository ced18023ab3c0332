"""Command ``smp explain``: the explanation of a partition file."""

from argparse import Namespace
from pathlib import Path

from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.explanation import Explanation

__all__ = ["run"]


def run(given: Namespace) -> int:
    """Print the explanation, or write it to a file in the form that its ending asks for; returns the exit status."""
    explanation = Explanation(Partition.from_json(Path(given.partition).read_text()))
    if given.out is None:
        print(explanation)
    else:
        explanation.save(given.out)
    return 0
