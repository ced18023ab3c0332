"""Joins the parts of tensors that tensor-parallel ranks have written.

A part does not tell the shape of the whole tensor. So whole shapes come from a checkpoint of the same model or a folder
of Hugging Face, and tell the dimension along which parts were cut::

    parts [8, 32] and [8, 32], whole [16, 32]     one below the other
    parts [8, 32] and [8, 32], whole [8, 32]      the same tensor twice
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.errors import CheckpointError

__all__ = ["cut_dim", "join_parts", "union"]

Shape = tuple[int, ...]


def cut_dim(parts: Sequence[Shape], whole: Shape) -> int | None:
    """Dimension along which tensors of the shapes ``parts`` join to ``whole``; ``None``: each is whole.

    Raises:
        ValueError: they do not.
    """
    if all(part == whole for part in parts):
        return None
    for dim, size in enumerate(whole):
        rest = whole[:dim] + whole[dim + 1 :]
        if all(len(part) == len(whole) and part[:dim] + part[dim + 1 :] == rest for part in parts) and (
            sum(part[dim] for part in parts) == size
        ):
            return dim
    raise ValueError(f"{', '.join(str(list(part)) for part in parts)} do not make {list(whole)}.")


def join_parts(
    parts: Sequence[Mapping[str, LazyTensor]], like: Mapping[str, Shape] | None, source: str
) -> dict[str, LazyTensor]:
    """Join the weights of tensor-parallel ranks.

    Args:
        parts: Weights of each rank, in their order.
        like: Whole shapes; ``None``: not known, so all ranks must have the same.
        source: Name of the checkpoint for messages.

    Raises:
        CheckpointError: parts are lacking, do not fit, or should be alike and are not.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    whole = {}
    for name in names:
        found = [part[name] for part in parts if name in part]
        if len(found) != len(parts):
            raise CheckpointError(f"{source} has `{name}` of {len(found)} tensor parallel ranks, not of {len(parts)}.")
        whole[name] = found[0] if len(parts) == 1 else _join(name, found, like, source)
    return whole


def _join(name: str, parts: list[LazyTensor], like: Mapping[str, Shape] | None, source: str) -> LazyTensor:
    if like is None:
        if any(part.shape != parts[0].shape for part in parts) or not _are_equal(parts):
            raise CheckpointError(
                f"{source} has another `{name}` for each tensor parallel rank, so these are parts of it, and they do "
                "not tell how it was cut. Give the whole shapes: `--like` and a checkpoint, or a directory of Hugging "
                "Face, of the same model."
            )
        return parts[0]
    if name not in like:
        raise CheckpointError(f"{source} has `{name}`, which is not in what `--like` gives. Is that of another model?")
    try:
        dim = cut_dim([part.shape for part in parts], like[name])
    except ValueError as error:
        raise CheckpointError(f"{source}: the parts of `{name}` do not fit what `--like` gives: {error}") from error
    if dim is not None:
        return LazyTensor(like[name], parts[0].dtype, partial(_cat, parts, dim))
    if not _are_equal(parts):
        raise CheckpointError(
            f"{source} has `{name}` as a whole of each tensor parallel rank, and they differ. Which is right cannot be "
            "told."
        )
    return parts[0]


def _cat(parts: Sequence[LazyTensor], dim: int) -> Tensor:
    return torch.cat([part.read() for part in parts], dim)


def _are_equal(parts: Sequence[LazyTensor]) -> bool:
    first = parts[0].read()
    return all(part.dtype == first.dtype and torch.equal(first, part.read()) for part in parts[1:])


def union(parts: Sequence[Mapping[str, LazyTensor]], source: str) -> dict[str, LazyTensor]:
    """Weights of all stages; tensors that several stages have, such as tied weights, must be alike.

    Raises:
        CheckpointError: they are not.
    """
    found: dict[str, LazyTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            first = found.setdefault(name, tensor)
            if first is not tensor and (first.shape != tensor.shape or not _are_equal([first, tensor])):
                raise CheckpointError(f"{source} has two different tensors for `{name}`, of two pipeline ranks.")
    return found
