"""Between tensors with shapes and runs of elements in a flat buffer.

Nothing is copied where that can be avoided: a parameter is a view of the buffer that it stands in, and pieces that
stand behind each other in one tensor already are found to be that tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from smp_strategy.data_parallel.flat_layout import Slot

__all__ = ["common_base", "elements", "view"]


def view(flat: Tensor, slot: Slot) -> Tensor:
    """The parameter in ``slot`` of a flat buffer."""
    return flat.as_strided(slot.entry.shape, slot.entry.stride, slot.offset)


def elements(tensor: Tensor, slot: Slot) -> Tensor:
    """Those of ``tensor``, in the order in which those of the parameter in ``slot`` stand in memory."""
    tensor = tensor.detach()
    if tensor.stride() != slot.entry.stride:
        ordered = torch.empty_strided(tensor.shape, slot.entry.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def common_base(pieces: Sequence[Tensor | None], places: Sequence[int], shard: Tensor) -> Tensor | None:
    """The tensor like ``shard`` that ``pieces`` are views of, if there is one."""
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
