"""Command ``smp explain``: the explanation of a partition file."""

from argparse import Namespace
from pathlib import Path

from smp_strategy.config.special_paths import special_file
from smp_strategy.errors import ConfigError
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.reports.explain.explanation import Explanation

__all__ = ["run"]


def run(given: Namespace) -> int:
    """Print the explanation, or write it to a file in the form that its ending asks for; returns the exit status."""
    if kind := special_file(given.partition):  # a read of it may never end
        raise ConfigError(f"{given.partition} is {kind}, and not a partition. Give a file.")
    try:
        text = Path(given.partition).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{given.partition} is no partition, which is a text in JSON: {error}.") from None
    explanation = Explanation(Partition.from_json(text))
    if given.out is None:
        print(explanation)
    else:
        explanation.save(given.out)
    return 0
