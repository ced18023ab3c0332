"""``LayerBlock`` and ``SplitKind``: the plan of a split as plain data, and checks of its feasibility.

Layers are split in *blocks*: the projections of an attention, the layers of a feed-forward part. The code between the
layers of a block works on parts, so a block is split as a whole or not at all. Blocks come from several sources
(patterns, registered classes, known models, see :mod:`smp_strategy.tensor_parallel.split`), which give the
:class:`SplitKind` of each layer. Whether sizes and numbers of heads allow it is checked here, from shapes alone.

Report of a split: for each layer its split and the source, or the reason why it is whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, final

from torch import nn

from smp_strategy.config.sizes import show_count
from smp_strategy.errors import ConfigError

__all__ = ["LayerBlock", "SplitKind", "cut_key", "describe", "linear_sizes", "problem_of", "LayerLine", "SplitReport"]


Style = Literal["column", "row", "vocab", "logits", "embedding", "inside", "whole", "layer"]


@final
@dataclass(frozen=True)
class SplitKind:
    """How a layer is split.

    ``column``: by output features; ``row``: by input features; ``vocab``: an embedding by rows; ``logits``: a linear
    layer by output features, whose result code uses as if it were whole; ``embedding``: an embedding by columns;
    ``inside``: not at all, but its inputs are parts, so its gradients are summed; ``whole``: not at all, on purpose;
    ``layer``: as ``split_by`` does it.
    """

    style: Style
    num_blocks: int = 1
    """Number of matrices fused into one, each of which is split by itself."""
    granule: int = 1
    """Number of features that stay together: those of a head."""
    is_whole_outside: bool = False
    """Output that would be split is gathered; input that would be expected in parts is whole."""
    looks_whole: bool = False
    """Split output is used as if it were whole, and input may be whole: only the observation of one step shows how code
    uses them."""
    split_by: Callable[..., nn.Module] | None = field(default=None, compare=False)
    """Splits a layer in place, given the group as its second argument."""


@final
@dataclass(frozen=True)
class LayerBlock:
    """Layers that are split together or not at all."""

    name: str
    """Qualified name of the module that contains them."""
    source: str
    """Source of the block, for the report."""
    layers: Mapping[str, SplitKind]
    """Split kinds by qualified name."""
    heads: Mapping[str, int] = field(default_factory=dict)
    """Numbers of heads by description; they must be multiples of the number of ranks."""
    divided: tuple[tuple[str, str], ...] = ()
    """Attributes that are divided by the number of ranks: qualified name of the module, name of the attribute."""
    attention: tuple[str, int] | None = None
    """Qualified name of the attention module, and position of the attention weights in its result."""
    replaced: tuple[tuple[str, str, object], ...] = ()
    """Attributes with another value: qualified name of the module, name of the attribute, the value."""
    bond: str | None = None
    """Blocks with the same bond are split together or not at all."""
    problem: str | None = None
    """Reason why it cannot be split, if known from the start."""

    def refused(self, problem: str) -> "LayerBlock":
        """The same block, marked as not to be split."""
        return replace(self, problem=problem)


def _is_conv1d(layer: nn.Module) -> bool:
    """Whether ``layer`` is a ``Conv1D`` of Hugging Face: a linear layer whose weight is [input, output]."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(layer).__mro__
    )


def linear_sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Numbers of input and output features of a linear layer; ``None`` for other layers."""
    # Not `layer.weight`: a computed weight (spectral norm) may change when it is read.
    weight = layer._parameters.get("weight")
    if weight is not None and weight.ndim != 2:
        return None
    if isinstance(layer, nn.Linear):
        return (layer.in_features, layer.out_features) if weight is None else (weight.shape[1], weight.shape[0])
    return (weight.shape[0], weight.shape[1]) if weight is not None and _is_conv1d(layer) else None


def problem_of(block: LayerBlock, modules: Mapping[str, nn.Module], num_ranks: int) -> str | None:
    """Reason why ``block`` cannot be split over ``num_ranks``, or ``None``."""
    if block.problem is not None:
        return block.problem
    for what, number in block.heads.items():
        if number % num_ranks:
            return f"{number} {what} cannot be divided over {num_ranks} ranks"
    return next(_problems(block, modules, num_ranks), None)


def _problems(block: LayerBlock, modules: Mapping[str, nn.Module], num_ranks: int) -> Iterator[str]:
    for name, how in block.layers.items():
        length = _length(modules[name], how)
        if isinstance(length, str):
            yield f"`{name}` {length}"
            continue
        if length is None:
            continue
        unit = how.num_blocks * how.granule
        if length % unit or length // unit < num_ranks:
            of = f" in {how.num_blocks} fused blocks" * (how.num_blocks > 1)
            of += f" in heads of {how.granule}" * (how.granule > 1)
            yield f"{length} features{of} of `{name}` cannot be cut for {num_ranks} ranks"
        elif how.granule > 1 and length // unit % num_ranks:
            yield f"{length // unit} heads of `{name}` cannot be divided over {num_ranks} ranks"


def _length(layer: nn.Module, how: SplitKind) -> int | str | None:
    """Length of the dim that is cut, or the reason why there is none; ``None`` if the layer itself decides."""
    if how.style in ("inside", "whole", "layer"):
        return None
    kind = type(layer).__name__
    if not type(layer).__module__.startswith("torch."):
        kind = f"{type(layer).__module__}.{kind}"
    if how.style in ("vocab", "embedding"):
        if not isinstance(layer, nn.Embedding):
            return f"is a {kind}, which has no vocabulary to split"
        return layer.num_embeddings if how.style == "vocab" else layer.embedding_dim
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return layer.out_channels if how.style == "column" else layer.in_channels
    sizes = linear_sizes(layer)
    if sizes is None:
        return f"is a {kind}, which cannot be split by {how.style}s: it is no linear or convolutional layer"
    return sizes[0] if how.style == "row" else sizes[1]


def describe(how: SplitKind) -> str:
    """``how`` as text for reports."""
    words = {
        "column": "by columns",
        "row": "by rows",
        "vocab": "by vocabulary",
        "logits": "by vocabulary",
        "embedding": "by embedding dim",
        "inside": "whole, among parts",
        "whole": "whole",
        "layer": "by its own class",
    }
    details = []
    if how.num_blocks > 1:
        details.append(f"{how.num_blocks} fused")
    if how.granule > 1:
        details.append(f"heads of {how.granule}")
    if how.is_whole_outside:
        details.append({"column": "output gathered", "row": "input cut"}.get(how.style, "output gathered"))
    return words[how.style] + (f" ({', '.join(details)})" if details else "")


def cut_key(layer: nn.Module, how: SplitKind, parameter: str) -> object:
    """Key that is equal for parameters with the same cut; ``None`` for one that stays whole."""
    if how.style in ("inside", "whole") or (how.style == "row" and parameter == "bias"):
        return None
    if how.style == "layer":
        return id(layer), parameter
    across = how.style in ("row", "embedding")
    dim = int(across != (_is_conv1d(layer) and parameter == "weight"))
    return dim, how.num_blocks, how.granule


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
