"""Explain a partition file: ``python -m smp_strategy.reports.explain partition.json [page.html]``."""

import argparse
from pathlib import Path

from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.explanation import Explanation

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Print the explanation, or write it to the second file in the form that its ending asks for."""
    parser = argparse.ArgumentParser(prog="python -m smp_strategy.reports.explain", description=__doc__)
    parser.add_argument("partition", type=Path, help="what `partition_file` or `save_partition` has written")
    parser.add_argument("output", type=Path, nargs="?", help="a file: .txt, .json or .html")
    given = parser.parse_args(arguments)
    explanation = Explanation(Partition.from_json(given.partition.read_text()))
    if given.output is None:
        print(explanation)
    else:
        explanation.save(given.output)


if __name__ == "__main__":
    main()
