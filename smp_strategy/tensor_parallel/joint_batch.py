"""All-gather of the batches that the ranks of a tensor-parallel group have read (``prescaled_batch=False``).

Ranks of a group have parts of one model, so each of them computes something of every sample: words of its part of the
vocabulary, its heads, its columns. So before a step samples are gathered, in the order of the ranks, and all ranks
continue with one batch, as if they had read the same. Tokens, labels and images are small beside activations. The large
residual stream between the blocks of a transformer is then split by samples again, and each rank keeps some of them
(:mod:`smp_strategy.tensor_parallel.sequence_parallel`).

Gathered are the leaves that microbatches are cut from: dim 0 of tensors, and lists with one item per sample
(:mod:`smp_strategy.model.samples`). Ranks may have different numbers of samples. Any other leaf must be the same on all
ranks. That is compared, as are the other sizes of tensors, on all ranks alike, so that all of them raise the same
error.
"""

import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.samples import (
    BatchSource,
    Path,
    Samples,
    find_samples,
    is_array,
    length_of,
    refuse_other_sizes,
    shown_path,
    visited,
)

__all__ = ["join"]


class _Leaf(NamedTuple):
    """Description of a leaf of a batch for other ranks."""

    kind: str
    """Text that must be equal on all ranks; part of the error if it is not."""
    content: int = 0
    """Checksum of values that must be equal on all ranks."""
    items: Any = None
    """A list with one item per sample, or an array."""


class _Described(NamedTuple):
    """Description of a batch for other ranks."""

    samples: int | None
    leaves: list[_Leaf]
    problem: str = ""
    """Reason why it cannot be joined with others."""


def join(batch: Any, group: TensorGroup, known: BatchSource | None = None) -> tuple[Any, BatchSource | None]:
    """The samples of all ranks of ``group`` in one batch, and their positions. Collective.

    Args:
        batch: Batch of this rank.
        group: Ranks of the tensor-parallel group.
        known: Positions of samples in ``batch``, as the data loader tells them.

    Raises:
        UnsupportedError: Batches do not fit together; raised on all ranks.
    """
    samples = find_samples(batch, known)
    ranks: list[_Described] = group.objects(_described(batch, samples, known))
    _check(ranks)
    lengths = [rank.samples or 0 for rank in ranks]
    position = iter(range(len(ranks[0].leaves)))

    def visit(path: Path, leaf: Any) -> Any:
        number = next(position)
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples.number:
            return group.gather(leaf, 0, lengths)
        if ranks[group.rank].leaves[number].items is None:
            return leaf
        items = [rank.leaves[number].items for rank in ranks]
        if isinstance(leaf, np.ndarray):
            return np.concatenate(items)
        return type(leaf)(item for part in items for item in part)

    return visited(batch, samples.lists, visit), None if samples.number is None else BatchSource(
        sum(lengths), samples.lists
    )


def _described(batch: Any, samples: Samples, known: BatchSource | None) -> _Described:
    leaves: list[_Leaf] = []
    try:
        refuse_other_sizes(known)
        visited(batch, samples.lists, lambda path, leaf: leaves.append(_leaf(path, leaf, samples)))
    except UnsupportedError as error:
        return _Described(None, [], str(error))
    return _Described(samples.number, leaves)


def _leaf(path: Path, leaf: Any, samples: Samples) -> _Leaf:
    if is_array(leaf) and length_of(leaf) not in (None, 1, samples.number):
        raise UnsupportedError(
            f"it has {samples.number} samples ({shown_path(samples.witness)}), but {shown_path(path)} has "
            f"{length_of(leaf)}, a different number of samples. Keep what is not per sample in the module (as a "
            "buffer)."
        )
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.requires_grad:
            what = "requires a gradient" if leaf.requires_grad else f"has the layout {leaf.layout}"
            raise UnsupportedError(f"it holds a tensor that {what}. Make it in the step, from an ordinary tensor.")
        if leaf.ndim and length_of(leaf) == samples.number:
            return _Leaf(f"a tensor of {leaf.dtype} with {_shape(leaf)}")
        return _Leaf(f"a number as a tensor of {leaf.dtype}", zlib.crc32(repr(leaf.tolist()).encode()))
    if isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == samples.number:
        return _Leaf(f"an array of {leaf.dtype} with {_shape(leaf)}", items=leaf)
    if path in samples.lists:
        return _Leaf("a list with one item per sample", items=leaf)
    if hasattr(leaf, "smp_slice") or (is_array(leaf) and not isinstance(leaf, np.ndarray)):
        raise UnsupportedError(
            f"it holds a {type(leaf).__name__} under {shown_path(path)}, which can be cut, but not be joined."
        )
    try:
        return _Leaf(f"a value of type {type(leaf).__name__}", zlib.crc32(pickle.dumps(leaf)))
    except Exception as error:
        raise UnsupportedError(
            f"it holds an object ({type(leaf).__name__}) that other ranks cannot be told of: {error}"
        ) from error


def _shape(array: Any) -> str:
    return f"samples of shape {list(array.shape[1:])}"


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
