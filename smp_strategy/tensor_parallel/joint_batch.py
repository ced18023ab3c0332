"""One batch of what the ranks of a tensor-parallel group have read, each for itself (``prescaled_batch=False``).

The ranks of a group have parts of one model, so each of them computes something of every sample: words of its part of
the vocabulary, its heads, its columns. So before a step samples are brought together, those of the first rank first,
and from then on all ranks have one batch, as if they had read it alike. Tokens, labels and images are small beside
activations. What is large, the stream between the blocks of a transformer, is then cut by samples again, and
each rank keeps some of them only (:mod:`smp_strategy.tensor_parallel.sequence`).

What is brought together is what a batch is cut into microbatches by: dim 0 of tensors, and lists with one item per
sample. Ranks may have different numbers of samples. Anything else is not per sample: it must be the same on all ranks,
which go on as if there were one. That is compared, as are the other sizes of tensors, by all ranks alike, so that all
of them raise the same error.
"""

import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.microbatch import num_samples, rebuilt
from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["join"]


class _Leaf(NamedTuple):
    """What other ranks must know of something in a batch."""

    kind: str
    """What must be the same on all ranks, as they are told if it is not."""
    content: int = 0
    """A number that depends on the values, where these must be the same."""
    items: list[Any] | None = None
    """Of a list with one item per sample."""


class _Described(NamedTuple):
    """What other ranks must know of a batch."""

    samples: int | None
    leaves: list[_Leaf]
    problem: str = ""
    """Why it cannot be joined with others."""


def join(batch: Any, group: TensorGroup) -> Any:
    """The samples of all ranks of ``group``, in their order. Collective.

    Args:
        batch: what this rank has read.
        group: the ranks.

    Raises:
        UnsupportedError: batches do not go together; on all ranks.
    """
    ranks: list[_Described] = group.objects(_described(batch))
    _check(ranks)
    lengths = [rank.samples or 0 for rank in ranks]
    position = iter(range(len(ranks[0].leaves)))

    def visit(leaf: Any) -> Any:
        number = next(position)
        if isinstance(leaf, Tensor):
            return group.gather(leaf, 0, lengths) if leaf.ndim else leaf
        if ranks[group.rank].leaves[number].items is None:
            return leaf
        return [item for rank in ranks for item in rank.leaves[number].items or ()]

    return rebuilt(batch, visit)


def _described(batch: Any) -> _Described:
    leaves: list[Any] = []

    def visit(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    rebuilt(batch, visit)
    dims = dict.fromkeys(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
    if len(dims) > 1:
        return _Described(
            None,
            [],
            f"its tensors have different numbers of samples (dim 0: {', '.join(map(str, dims))}). Keep tensors that "
            "are not per sample in the module (as buffers).",
        )
    samples = num_samples(batch)
    try:
        return _Described(samples, [_leaf(leaf, samples) for leaf in leaves])
    except UnsupportedError as error:
        return _Described(None, [], str(error))


def _leaf(leaf: Any, samples: int | None) -> _Leaf:
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.requires_grad:
            what = "requires a gradient" if leaf.requires_grad else f"has the layout {leaf.layout}"
            raise UnsupportedError(f"it holds a tensor that {what}. Make it in the step, from an ordinary tensor.")
        if leaf.ndim:
            return _Leaf(f"a tensor of {leaf.dtype} with {_shape(leaf)}")
        return _Leaf(f"a number as a tensor of {leaf.dtype}", zlib.crc32(repr(leaf.item()).encode()))
    if isinstance(leaf, list) and len(leaf) == samples:
        return _Leaf("a list with one item per sample", items=leaf)
    if hasattr(leaf, "smp_slice"):
        raise UnsupportedError(f"it holds an object that cuts itself ({type(leaf).__name__}), which cannot be joined.")
    try:
        return _Leaf(f"a value of type {type(leaf).__name__}", zlib.crc32(pickle.dumps(leaf)))
    except Exception as error:
        raise UnsupportedError(
            f"it holds an object ({type(leaf).__name__}) that other ranks cannot be told of: {error}"
        ) from error


def _shape(tensor: Tensor) -> str:
    return f"samples of shape {list(tensor.shape[1:])}"


def _check(ranks: Sequence[_Described]) -> None:
    for number, rank in enumerate(ranks):
        if rank.problem:
            _refuse(f"that of rank {number} cannot: {rank.problem}")
        if len(rank.leaves) != len(ranks[0].leaves) or (rank.samples is None) != (ranks[0].samples is None):
            _refuse(
                f"those of ranks 0 and {number} hold different things ({len(ranks[0].leaves)} and {len(rank.leaves)}). "
                "Let all ranks collate alike."
            )
        for first, leaf in zip(ranks[0].leaves, rank.leaves, strict=True):
            if first.kind != leaf.kind:
                _refuse(
                    f"rank 0 has {first.kind} where rank {number} has {leaf.kind}. Let all ranks collate alike, and "
                    "pad sequences to one length."
                )
            if first.content != leaf.content:
                _refuse(
                    f"{first.kind} differs between ranks 0 and {number}. What does not stand for samples must be the "
                    "same on all of them."
                )


def _refuse(why: str) -> None:
    raise UnsupportedError(
        "With `prescaled_batch=False` the batches of a tensor-parallel group's ranks are put together, but "
        f"{why} (Or let all of them read the same batch: `prescaled_batch=True`.)"
    )
