"""Collecting what the stages hold on one rank, item by item.

The collector receives one tensor at a time straight into the result, so no rank ever holds more than the result plus
one tensor. Objects that are no tensors (step counts, names) travel together in one message per stage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["collect"]


def collect(
    items: Mapping[str, Any], owner: Mapping[str, int], ranks: Sequence[int], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Bring every item to the last of ``ranks``.

    Args:
        items: this rank's items by name; a value is a tensor or a nest of containers with tensors in it.
        owner: for every name, in the order of the result, the index in ``ranks`` of the rank that has it.
        ranks: global ranks of those who have something; the last one collects.
        group: their process group; ``None``: that of all ranks.

    Returns:
        All items on the collector, on the CPU; an empty dict elsewhere.
    """
    rank, collector = dist.get_rank(), ranks[-1]
    result: dict[str, Any] = {}
    for index, source in enumerate(ranks):
        names = [name for name, holder in owner.items() if holder == index]
        if source == collector == rank:
            result.update({name: pytree.tree_map(_on_cpu, items[name]) for name in names})
        elif source == rank:
            _send({name: items[name] for name in names}, collector, group)
        elif rank == collector:
            result.update(_receive(source, group))
    return {name: result[name] for name in owner} if rank == collector else {}


def _send(items: dict[str, Any], target: int, group: dist.ProcessGroup | None) -> None:
    leaves, _ = pytree.tree_flatten(items)
    skeleton = pytree.tree_map(lambda leaf: _meta(leaf) if isinstance(leaf, Tensor) else leaf, items)
    dist.send_object_list([skeleton], target, group=group)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            dist.send(leaf.detach().cpu().contiguous(), target, group=group)


def _receive(source: int, group: dist.ProcessGroup | None) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, source, group=group)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        dist.recv(tensor, source, group=group)
        return tensor

    return pytree.tree_map(fill, box[0])


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf
