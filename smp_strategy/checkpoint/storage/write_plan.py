"""Write plan of a sharded save: each element is written by one rank, and bytes are balanced over ranks.

Ranks gather their offers, and all of them compute the same plan. Rectangles of different ranks may overlap in any way;
overlapping ones are divided.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from smp_strategy.checkpoint.storage.dcp_format import FlatState, Path
from smp_strategy.distributed.balance import balanced_among
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle, disjoint

__all__ = ["Assigned", "LocalTensorInfo", "Offer", "WritePlan", "assign"]


class LocalTensorInfo(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@final
@dataclass(frozen=True)
class Offer:
    """Tensors and objects that a rank holds."""

    tensors: Mapping[str, tuple[LocalTensorInfo, tuple[Rectangle, ...]]]
    objects: tuple[str, ...]
    paths: Mapping[str, Path]
    aliases: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, state: FlatState) -> "Offer":
        tensors = {
            name: (
                LocalTensorInfo(held.shape, held.dtype),
                tuple([block.rectangle for block in held.blocks]),
            )
            for name, held in state.tensors.items()
        }
        return cls(tensors, tuple(state.objects), state.paths, state.aliases)


class Assigned(NamedTuple):
    """Rectangle of a tensor that a rank writes."""

    name: str
    part: Rectangle
    block: Rectangle
    """The rank's rectangle that contains it."""


@final
@dataclass(frozen=True)
class WritePlan:
    """Assignment of rectangles and objects to ranks, and the content of the resulting folder."""

    shares: Sequence[Sequence[Assigned]]
    """Rectangles that each rank writes."""
    objects: Sequence[Sequence[str]]
    """Objects that each rank writes."""
    tensors: Mapping[str, LocalTensorInfo]
    paths: Mapping[str, Path]
    aliases: Mapping[str, tuple[str, ...]]


def assign(offers: Sequence[Offer]) -> WritePlan:
    """The plan for the offers of all ranks.

    Raises:
        CheckpointError: ranks have the same name for different things, or nobody has some elements of a tensor.
    """
    tensors: dict[str, LocalTensorInfo] = {}
    holders: dict[str, dict[Rectangle, list[int]]] = {}
    objects: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        for name, (described, rectangles) in offer.tensors.items():
            if tensors.setdefault(name, described) != described:
                raise CheckpointError(
                    f"`{name}` cannot be saved: it has shape {list(described.shape)} and {described.dtype} on rank "
                    f"{rank}, but shape {list(tensors[name].shape)} and {tensors[name].dtype} on ranks before it."
                )
            found = holders.setdefault(name, {})
            for rectangle in rectangles:
                found.setdefault(rectangle, []).append(rank)
        for name in offer.objects:
            objects.setdefault(name, rank)
    if both := sorted(objects.keys() & tensors.keys()):
        raise CheckpointError(f"`{both[0]}` cannot be saved: it is a tensor on some ranks, but not on all.")
    items, choices = [], []
    for name, described in tensors.items():
        for part, block in _parts(name, described, holders[name]):
            items.append(Assigned(name, part, block))
            choices.append(holders[name][block])
    sizes = [item.part.numel * tensors[item.name].dtype.itemsize for item in items]
    shares: list[list[Assigned]] = [[] for _ in offers]
    for item, rank in zip(items, balanced_among(sizes, choices, len(offers)), strict=True):
        shares[rank].append(item)
    return WritePlan(
        shares=shares,
        objects=[[name for name, owner in objects.items() if owner == rank] for rank in range(len(offers))],
        tensors=tensors,
        paths={name: path for offer in reversed(offers) for name, path in offer.paths.items()},
        aliases={name: names for offer in offers for name, names in offer.aliases.items()},
    )


def _parts(
    name: str, described: LocalTensorInfo, holders: Mapping[Rectangle, list[int]]
) -> list[tuple[Rectangle, Rectangle]]:
    """Disjoint rectangles that make up the tensor, each with the rectangle of some rank that contains it."""
    numel = math.prod(described.shape)
    parts = disjoint(each for each in holders if each.numel or not numel)
    there = sum(part.numel for part in parts)
    if there != numel or not parts:
        raise CheckpointError(
            f"`{name}` cannot be saved: of its {numel} elements, the ranks have {there}. All of them must be in the "
            "state of some rank."
        )
    return list(parts.items())
