"""Conversion between shaped tensors and runs of elements in a flat buffer, without copies where possible.

A parameter is a view of its buffer, and pieces that already stand behind each other in one tensor are recognised as
that tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from smp_strategy.data_parallel.flat_layout import Slot

__all__ = ["common_base", "elements", "view"]


def view(flat: Tensor, slot: Slot) -> Tensor:
    """View of the parameter in ``slot`` of a flat buffer."""
    return flat.as_strided(slot.entry.shape, slot.entry.stride, slot.offset)


def elements(tensor: Tensor, slot: Slot) -> Tensor:
    """Elements of ``tensor`` in the memory order of the parameter in ``slot``."""
    tensor = tensor.detach()
    if tensor.stride() != slot.entry.stride:
        ordered = torch.empty_strided(tensor.shape, slot.entry.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def common_base(pieces: Sequence[Tensor | None], places: Sequence[int], shard: Tensor) -> Tensor | None:
    """Tensor like ``shard`` that all ``pieces`` are views of, if there is one."""
    storage = None
    for piece, place in zip(pieces, places, strict=True):
        if piece is None:
            return None
        if not piece.numel():
            continue
        own = piece.untyped_storage()
        storage = storage or own
        is_view = own.data_ptr() == storage.data_ptr() and piece.storage_offset() == place
        if not is_view or own.nbytes() != shard.nbytes or piece.dtype != shard.dtype:
            return None
    return None if storage is None else shard.new_empty(0).set_(storage, 0, shard.shape, (1,))
