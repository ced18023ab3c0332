"""``LayerBlock`` and ``SplitKind``: the plan of a split as plain data, and checks of its feasibility.

Layers are split in *blocks*: the projections of an attention, the layers of a feed-forward part. The code between the
layers of a block works on parts, so a block is split as a whole or not at all. Blocks come from several sources
(patterns, registered classes, known models, see :mod:`smp_strategy.tensor_parallel.split`), which give the
:class:`SplitKind` of each layer. Whether sizes and numbers of heads allow it is checked here, from shapes alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, final

from torch import nn

__all__ = ["LayerBlock", "SplitKind", "Style", "cut_key", "describe", "is_conv1d", "linear_sizes", "problem_of"]

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


def is_conv1d(layer: nn.Module) -> bool:
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
    return (weight.shape[0], weight.shape[1]) if weight is not None and is_conv1d(layer) else None


def problem_of(block: LayerBlock, modules: Mapping[str, nn.Module], num_ranks: int) -> str | None:
    """Reason why ``block`` cannot be split over ``num_ranks``, or ``None``.

    Args:
        block: Block to be split.
        modules: All modules by qualified name.
        num_ranks: Number of ranks.
    """
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
    dim = int(across != (is_conv1d(layer) and parameter == "weight"))
    return dim, how.num_blocks, how.granule
