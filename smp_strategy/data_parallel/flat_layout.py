"""Flat layout: which elements of which parameter each rank of a shard group holds.

The parameters of a unit are gathered and sharded as a whole, so they stand behind each other in flat buffers: one for
each dtype, trained parameters apart from frozen ones (which need no gradients), and small ones, which stay gathered,
apart from large ones. A buffer is cut into equal shards, one per rank of the group, wherever the cut falls. So an
all-gather writes straight into the weights, and a rank holds of each parameter a run of its elements, in memory order:
its *piece*, on which any elementwise optimizer can work::

    rank 0                  rank 1                  rank 2
    |wwwwwwwwwwwwwwwwwwwwwww|wwww.bbbb.vvvvvvvvvvvvv|vvvvvvvvvv.............|     . padding

Parameters and shards begin at multiples of ``BLOCK_BYTES``. Kernels compute whole vectors of elements differently from
the remainder, and matrix products may depend on the alignment of their factors to cache lines. With aligned parameters
and pieces each element is computed as in a tensor of its own, so the bits are the same.

Sizes, with b elements in a block, n_i elements in parameter i, and d ranks::

    blocks of a buffer  =  d * ceil(sum_i ceil(n_i / b) / d)
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

__all__ = ["BLOCK_BYTES", "FlatParameter", "FlatLayout", "Piece", "Slot", "UnitLayout"]

# Two of the widest vectors (kernels take them in pairs), and a multiple of a cache line.
BLOCK_BYTES = 128


@final
@dataclass(frozen=True, kw_only=True)
class FlatParameter:
    """Metadata of a parameter."""

    names: tuple[str, ...]
    """Names in the unit; several if the parameter is tied."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Without gaps."""
    dtype: str
    """PyTorch's name: ``float32``."""
    itemsize: int
    """Bytes of an element."""
    requires_grad: bool
    use_dtype: str = ""
    """Dtype in which units use it; empty: ``dtype``."""
    use_itemsize: int = 0
    gradient_dtype: str = ""
    """Dtype in which its gradients are added up; empty: ``dtype``."""
    gradient_itemsize: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@final
@dataclass(frozen=True, kw_only=True)
class Slot:
    """Place of a parameter in a flat buffer."""

    entry: FlatParameter
    offset: int
    """In elements."""

    @property
    def stop(self) -> int:
        """End of its elements; padding may follow."""
        return self.offset + self.entry.numel


@final
@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements of a parameter that a rank holds; possibly none."""

    start: int
    """Index of the first element, in memory order of the parameter."""
    numel: int
    offset: int
    """Offset in the shard, in elements."""

    @property
    def in_shard(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@final
@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Layout of a flat buffer: parameters of one kind."""

    dtype: str
    """Dtype of the shards, which an optimizer updates."""
    itemsize: int
    use_dtype: str
    """Dtype of the gathered buffer, and of the all-gather."""
    use_itemsize: int
    gradient_dtype: str
    """Dtype in which gradients are added up and reduced; it may be wider."""
    gradient_itemsize: int
    is_trained: bool
    is_persistent: bool
    """Whether the buffer stays gathered: its parameters have fewer elements than the persistence threshold."""
    degree: int
    """Number of shards: ranks of the shard group."""
    num_owners: int
    """Number of ranks that have the same shard and each update a part of it."""
    slots: tuple[Slot, ...]

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard, padding included."""
        return self.num_owners * self.own_numel

    @cached_property
    def own_numel(self) -> int:
        """Elements of a shard that one rank updates, padding included."""
        block = self._block
        return block * -(-self.slots[-1].stop // (block * self.degree * self.num_owners))

    @property
    def full_numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.degree * self.shard_numel

    @property
    def is_cast(self) -> bool:
        """Whether the buffer is gathered in another dtype than that of the shards."""
        return self.use_dtype != self.dtype

    @property
    def shard_bytes(self) -> int:
        """Bytes of the values that a rank keeps between uses, unless the whole buffer stays gathered."""
        if not self.is_cast:
            return self.itemsize * self.shard_numel
        # Values that other owners update arrive in the dtype in which they are used.
        passed_on = self.use_itemsize * self.shard_numel if self.num_owners > 1 else 0
        return self.itemsize * self.own_numel + passed_on

    @property
    def resting_bytes(self) -> int:
        """Bytes of the values that a rank keeps between uses."""
        if not self.is_persistent:
            return self.shard_bytes
        return self.full_bytes + (self.shard_bytes if self.is_cast else 0)

    @property
    def full_bytes(self) -> int:
        return self.use_itemsize * self.full_numel

    @property
    def gradient_bytes(self) -> int:
        return self.gradient_itemsize * self.shard_numel

    @property
    def full_gradient_bytes(self) -> int:
        return self.gradient_itemsize * self.full_numel

    @property
    def _block(self) -> int:
        return _block(min(self.itemsize, self.use_itemsize))

    @property
    def padding(self) -> Sequence[tuple[int, int]]:
        """Start and stop of the runs of elements that belong to no parameter."""
        ends = [slot.stop for slot in self.slots]
        starts = [*(slot.offset for slot in self.slots[1:]), self.full_numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]

    def piece(self, slot: Slot, rank: int) -> Piece:
        """Piece of the parameter in ``slot`` that ``rank`` of the group holds."""
        return self._piece(slot, rank, self.shard_numel)

    def own_piece(self, slot: Slot, rank: int, owner: int) -> Piece:
        """Part of that piece that ``owner`` (the number of a replica) updates."""
        return self._piece(slot, rank * self.num_owners + owner, self.own_numel)

    def own_pieces(self, slot: Slot) -> dict[int, Piece]:
        """Pieces of the parameter in ``slot`` that have elements, by the number of the rank and owner together."""
        numbers = range(slot.offset // self.own_numel, -(-slot.stop // self.own_numel)) if self.own_numel else ()
        return {number: piece for number in numbers if (piece := self._piece(slot, number, self.own_numel)).numel}

    def _piece(self, slot: Slot, number: int, numel: int) -> Piece:
        first = number * numel
        start = min(max(slot.offset, first), slot.stop)
        stop = max(start, min(slot.stop, first + numel))
        if start == stop:
            return Piece(start=0, numel=0, offset=0)
        return Piece(start=start - slot.offset, numel=stop - start, offset=start - first)


@final
@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """Layouts of the flat buffers of a unit."""

    flats: tuple[FlatLayout, ...]

    @classmethod
    def of(
        cls, entries: Iterable[FlatParameter], degree: int, persistence_threshold: int = 0, num_owners: int = 1
    ) -> "UnitLayout":
        """Lay out the parameters of a unit; the same on every rank.

        Args:
            entries: Parameters, each once, in an order that is the same on every rank.
            degree: Number of ranks in the shard group.
            persistence_threshold: Parameters with fewer elements stay gathered. Their gradients and optimizer state are
                sharded like all others.
            num_owners: Number of ranks that have the same shard, if each of them updates a part of it.
        """

        def kind(entry: FlatParameter) -> tuple[str, int, str, int, str, int, bool, bool]:
            used_as = (entry.use_dtype or entry.dtype, entry.use_itemsize or entry.itemsize)
            summed_in = (entry.gradient_dtype or entry.dtype, entry.gradient_itemsize or entry.itemsize)
            is_persistent = entry.numel < persistence_threshold
            return entry.dtype, entry.itemsize, *used_as, *summed_in, entry.requires_grad, is_persistent

        by_kind = itertools.groupby(sorted(entries, key=kind), key=kind)
        return cls(
            flats=tuple(
                FlatLayout(
                    dtype=dtype,
                    itemsize=itemsize,
                    use_dtype=use_dtype,
                    use_itemsize=use_itemsize,
                    gradient_dtype=gradient_dtype,
                    gradient_itemsize=gradient_itemsize,
                    is_trained=is_trained,
                    is_persistent=is_persistent,
                    degree=degree,
                    num_owners=num_owners,
                    slots=_slots(members, _block(min(itemsize, use_itemsize))),
                )
                for (
                    (dtype, itemsize, use_dtype, use_itemsize, gradient_dtype, gradient_itemsize, *flags),
                    members,
                ) in by_kind
                for is_trained, is_persistent in (flags,)
            )
        )

    @property
    def full_bytes(self) -> int:
        """Bytes of the parameters while they are gathered."""
        return sum(flat.full_bytes for flat in self.flats)

    @property
    def transient_numel(self) -> int:
        """Elements, padding included, that are in memory during uses only."""
        return sum(flat.full_numel for flat in self.flats if not flat.is_persistent)

    @property
    def transient_bytes(self) -> int:
        """Bytes of these elements. They add to the resting ones: a shard stays beside the buffer, whose memory is
        allocated and freed as a whole."""
        return sum(flat.full_bytes for flat in self.flats if not flat.is_persistent)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shards."""
        return sum(flat.shard_bytes for flat in self.flats)

    @property
    def resting_bytes(self) -> int:
        """Bytes of parameters that a rank holds between uses: its shards, and the buffers that stay gathered."""
        return sum(flat.resting_bytes for flat in self.flats)


def _block(itemsize: int) -> int:
    return max(1, BLOCK_BYTES // itemsize)


def _slots(entries: Iterable[FlatParameter], block: int) -> tuple[Slot, ...]:
    slots = []
    offset = 0
    for entry in entries:
        slots.append(Slot(entry=entry, offset=offset))
        offset += block * -(-entry.numel // block)
    return tuple(slots)
