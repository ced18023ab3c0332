"""A held state as one process would have it, on one rank.

All ranks say what they have; the first that has a rectangle sends it, and the collector receives one after the other
straight into the result, so that no rank ever holds more than the result plus one tensor.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.checkpoint.storage.held_tensor import Held, Opaque
from smp_strategy.distributed import watched_collectives as collectives

__all__ = ["collect", "merged", "on_all_ranks"]

_PART, _STATE = "a part of a state", "a state that rank 0 has collected"


class _Offer(NamedTuple):
    """What one rank has of one entry."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """``None``: it is no tensor."""
    aliases: tuple[str, ...]
    rectangles: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Offsets and sizes."""
    value: Any = None
    """What is no tensor."""


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """Put together on global rank 0 what all ranks have. Collective over all ranks.

    Args:
        state: entries of this rank by their names; a :class:`~smp_strategy.checkpoint.storage.held_tensor.Held` for
            each tensor.

    Returns:
        Every entry on global rank 0, tensors on the host, in an order in which each rank's entries stand as on that
        rank; tied tensors are one. ``{}`` elsewhere.
    """
    mine = {name: _offer(value) for name, value in state.items()}
    offers = collectives.gather_objects(mine, "the collection of a state")
    rank = dist.get_rank()
    result = _Result(merged(offers), offers) if rank == 0 else None
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for source, entries in enumerate(offers):
        for name, offer in entries.items():
            for number, (offsets, sizes) in enumerate(offer.rectangles):
                if (name, offsets) in seen:
                    continue
                seen.add((name, offsets))
                block = state[name].blocks[number].tensor if source == rank else None
                if result is not None:
                    result.take(name, offsets, sizes, block, source)
                elif block is not None:
                    collectives.send(_on_host(block), 0, _PART)
    return {} if result is None else result.entries()


def on_all_ranks(collected: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`collect` has returned on global rank 0, on every rank. Collective over all ranks."""
    offers = collectives.tell({name: _offer(_held(value)) for name, value in collected.items()}, 0, _STATE)
    found: dict[str, Any] = {}
    for name, offer in offers.items():
        if offer.dtype is None:
            found[name] = offer.value
            continue
        values = collected.get(name)
        found[name] = torch.empty(offer.shape, dtype=offer.dtype, device="cpu") if values is None else values
        collectives.broadcast(found[name], 0, group=None, doing=_STATE).wait()
    return found


def _held(value: Any) -> Any:
    return Held.whole(value) if isinstance(value, Tensor) else value


class _Result:
    """The collector's."""

    def __init__(self, names: Iterable[str], offers: list[dict[str, _Offer]]) -> None:
        self._first = {name: next(entries[name] for entries in offers if name in entries) for name in names}
        self._tensors = {
            name: torch.empty(offer.shape, dtype=offer.dtype, device="cpu")
            for name, offer in self._first.items()
            if offer.dtype is not None
        }

    def take(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], block: Tensor | None, source: int
    ) -> None:
        """Put a rectangle in its place: this rank's ``block``, or what ``source`` sends."""
        place = self._tensors[name]
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        if block is not None:
            place.copy_(block)
        elif place.is_contiguous():
            collectives.receive(place, source, _PART)
        else:
            received = torch.empty(sizes, dtype=place.dtype, device="cpu")
            collectives.receive(received, source, _PART)
            place.copy_(received)

    def entries(self) -> dict[str, Any]:
        """All of them, under all their names."""
        found: dict[str, Any] = {}
        for name, offer in self._first.items():
            found[name] = self._tensors.get(name, offer.value)
            found.update((alias, found[name]) for alias in offer.aliases)
        return found


def _offer(value: Any) -> _Offer:
    if not isinstance(value, Held):
        return _Offer((), None, (), (), value.value if isinstance(value, Opaque) else value)
    rectangles = tuple((block.offsets, tuple(block.tensor.shape)) for block in value.blocks)
    return _Offer(value.shape, value.dtype, value.aliases, rectangles)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def merged(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names, each at the place that it has where it is known: a rank may have entries that others never see."""
    merged: list[str] = []
    known: set[str] = set()
    for names in map(list, lists):
        for before, name in zip([None, *names], names, strict=False):
            if name not in known:
                merged.insert(merged.index(before) + 1 if before is not None else 0, name)
                known.add(name)
    return merged
