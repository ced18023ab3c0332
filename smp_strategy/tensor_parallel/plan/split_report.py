"""Report of a split: for each layer its split and the source, or the reason why it is whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

__all__ = ["LayerLine", "SplitReport"]


@final
@dataclass(frozen=True)
class LayerLine:
    """A layer with parameters."""

    name: str
    """Its qualified name."""
    kind: str
    """Its class."""
    how: str
    """Split of the layer; ``whole`` if it is not split."""
    why: str
    """Source of the split, or reason why it is whole."""
    is_split: bool
    """Whether ranks have parts of it."""
    is_skipped: bool = False
    """Whether it might have been split under other conditions."""


@final
@dataclass(frozen=True)
class SplitReport:
    """Report of a split. As text: ``print(report)``; layers of equal blocks share one line."""

    lines: tuple[LayerLine, ...]
    num_ranks: int
    """Number of ranks that share the layers."""
    streams: tuple[str, ...] | None = None
    """Lists of layers with a split residual stream; ``None``: not requested."""
    stream_dim: int = 1
    """Dim of that split: 0 for samples, 1 for tokens."""

    @property
    def skipped(self) -> tuple[LayerLine, ...]:
        """Layers that have matrices but stay whole, for other reasons than the user's."""
        return tuple(line for line in self.lines if line.is_skipped)

    def why(self, parameter: str) -> str:
        """Source of the split of ``parameter``'s layer, or reason why it is whole."""
        return next((line.why for line in self.lines if parameter.startswith(f"{line.name}.")), "not in the report")

    def __str__(self) -> str:
        split = sum(line.is_split for line in self.lines)
        title = f"{split} of {len(self.lines)} layers are split over {self.num_ranks} ranks"
        if self.streams is not None:
            where = (
                f"those of {', '.join(self.streams)}" if self.streams else "none: no list has split layers throughout"
            )
            what = "tokens" if self.stream_dim else "samples"
            title = f"{title}; layers between which each rank has some of the {what}: {where}"
        rows = [(_merged([line.name for line in run]), *rest) for rest, run in _alike(self.lines)]
        table = [("layer", "class", "split", "why"), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in table
        ]
        return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])


def _alike(lines: Sequence[LayerLine]) -> list[tuple[tuple[str, str, str], list[LayerLine]]]:
    """Groups of lines that differ only in numbers of their names, ordered by their first lines."""
    groups: dict[object, list[LayerLine]] = {}
    for line in lines:
        parts = tuple("#" if part.isdigit() else part for part in line.name.split("."))
        groups.setdefault((parts, line.kind, line.how, _without_numbers(line)), []).append(line)
    return [((run[0].kind, run[0].how, run[0].why), run) for run in groups.values()]


def _without_numbers(line: LayerLine) -> str:
    """The reason without the numbers in names of blocks."""
    return ".".join("#" if part.isdigit() else part for part in line.why.split("."))


def _merged(names: Sequence[str]) -> str:
    """Names in short form: ``h.0.mlp, h.1.mlp, h.3.mlp`` as ``h.{0-1,3}.mlp``."""
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    return ".".join(part[0] if len(set(part)) == 1 else f"{{{_ranges(part)}}}" for part in columns)


def _ranges(numbers: Sequence[str]) -> str:
    found = sorted({int(number) for number in numbers})
    runs = [[number for _, number in run] for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
