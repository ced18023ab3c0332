"""Report of a split: for each layer its split and the source, or the reason why it is whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

from smp_strategy.config.sizes import show_count
from smp_strategy.errors import ConfigError

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
    is_asked: bool = False
    """Whether the user has asked that it stays whole."""


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

    def reasons(self) -> list[str]:
        """Reasons for layers that are whole, for each class: ``Linear (8 layers): nothing says how to split it``."""
        groups: dict[tuple[str, str], list[LayerLine]] = {}
        for line in self.lines:
            if not line.is_split:
                groups.setdefault((line.kind, _without_numbers(line)), []).append(line)
        return [
            f"{kind} ({show_count(len(lines), 'layer')}): {lines[0].why.rstrip('.')}"
            for (kind, _), lines in groups.items()
        ]

    def refuse_unsplit(self) -> None:
        """Refuse a split that splits nothing, unless the user has asked for whole layers: ranks would compute the same.

        Raises:
            ConfigError: no layer is split over several ranks.
        """
        is_asked = any(line.is_asked for line in self.lines)
        if self.num_ranks == 1 or is_asked or any(line.is_split for line in self.lines):
            return
        reasons = "; ".join(self.reasons()) or "no module has parameters of its own"
        raise ConfigError(
            f"`tensor_parallel_degree` is {self.num_ranks}, but none of the {len(self.lines)} layers would be split, "
            f"and every rank would compute all of them: {reasons}. Name layers in `tensor_parallel`, for example "
            '`{"blocks.*.up": "column", "blocks.*.down": "row"}`, or leave the degree out and use the ranks for stages '
            "(`pipeline_parallel_degree`), shards (`sharded_data_parallel_degree`) or replicas."
        )

    def _remedy(self) -> list[str]:
        """Advice about layers that stay whole, if the user has not asked for that."""
        if not self.skipped:
            return []
        first = self.skipped[0].name or "*"
        verb, them = ("stays", "it") if len(self.skipped) == 1 else ("stay", "them")
        return [
            f"{show_count(len(self.skipped), 'layer')} with matrices {verb} whole: each rank computes all of {them}. "
            f'Name {them} in `tensor_parallel` (`{{"{first}": "column"}}`; `replicate` if that is meant), or choose a '
            "degree that divides the sizes in the reasons."
        ]

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
        return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], *self._remedy()])


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
