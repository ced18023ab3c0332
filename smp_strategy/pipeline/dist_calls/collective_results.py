"""Results of collectives without communication, as if all ranks gave the same values as this one.

Used in dry runs, which have no values and must not wait for other ranks, and with a single replica. The shapes equal
those of the collective itself; with a single replica, so do the values.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AS_IF_ALIKE", "FUNCTIONAL_AS_IF_ALIKE", "ReplicaNumber"]


@final
class ReplicaNumber(NamedTuple):
    """Number of a rank among the ranks of a collective, and their count."""

    rank: int
    size: int


Given = dict[str, Any]
"""Arguments of a collective by name."""


def _combined(tensor: Tensor, op: Any, place: ReplicaNumber) -> Tensor:
    """Reduction of one copy of ``tensor`` per rank."""
    kind = str(op).lower().rpartition(".")[2]
    if kind == "sum":
        return tensor * place.size
    if kind == "product":
        return tensor**place.size
    if kind == "bxor" and place.size % 2 == 0:
        return torch.zeros_like(tensor)
    return tensor


def _op_of(given: Given) -> Any:
    return given.get("op", dist.ReduceOp.SUM)


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``target``; zeros if other ranks would give tensors of other sizes."""
    if target.numel() == source.numel():
        target.copy_(source.reshape(target.shape))
    else:
        target.zero_()


def _all_gather(given: Given, place: ReplicaNumber) -> None:
    for target in given["tensor_list"]:
        _fill(target, given["tensor"])


def _all_gather_into(given: Given, place: ReplicaNumber) -> None:
    output, mine = given["output_tensor"], given["input_tensor"]
    _fill(output, torch.cat([mine.reshape(-1)] * place.size))


def _all_gather_coalesced(given: Given, place: ReplicaNumber) -> None:
    for targets in given["output_tensor_lists"]:
        for target, mine in zip(targets, given["input_tensor_list"], strict=True):
            _fill(target, mine)


def _all_gather_object(given: Given, place: ReplicaNumber) -> None:
    given["object_list"][:] = [given["obj"]] * place.size


def _all_reduce(given: Given, place: ReplicaNumber) -> None:
    given["tensor"].copy_(_combined(given["tensor"], _op_of(given), place))


def _all_reduce_coalesced(given: Given, place: ReplicaNumber) -> None:
    for tensor in given["tensors"]:
        tensor.copy_(_combined(tensor, _op_of(given), place))


def _reduce(given: Given, place: ReplicaNumber) -> None:
    is_mine = place.rank == _root(given, "dst")
    tensor = given["tensor"]
    tensor.copy_(_combined(tensor, _op_of(given), place) if is_mine else tensor)


def _root(given: Given, name: str) -> int:
    root = given.get(name)
    return int(given.get(f"group_{name}") or 0) if root is None else int(root)


def _unchanged(given: Given, place: ReplicaNumber) -> None:
    """Receive from another rank: as if it sent the same value."""
    tensor = given["tensor"]
    tensor.copy_(tensor.clone())


def _received(given: Given, place: ReplicaNumber) -> int:
    _unchanged(given, place)
    return _root(given, "src")


def _reduce_scatter(given: Given, place: ReplicaNumber) -> None:
    _fill(given["output"], _combined(given["input_list"][place.rank], _op_of(given), place))


def _reduce_scatter_into(given: Given, place: ReplicaNumber) -> None:
    mine = given["input"].reshape(place.size, -1)[place.rank]
    _fill(given["output"], _combined(mine, _op_of(given), place))


def _all_to_all(given: Given, place: ReplicaNumber) -> None:
    for target in given["output_tensor_list"]:
        _fill(target, given["input_tensor_list"][place.rank])


def _all_to_all_single(given: Given, place: ReplicaNumber) -> None:
    _fill(given["output"], _exchanged(given["input"], given.get("input_split_sizes"), place))


def _exchanged(tensor: Tensor, sizes: Sequence[int] | None, place: ReplicaNumber) -> Tensor:
    pieces = tensor.split(list(sizes)) if sizes else tensor.chunk(place.size)
    return torch.cat([pieces[place.rank]] * place.size)


def _gather(given: Given, place: ReplicaNumber) -> None:
    for target in given.get("gather_list") or ():
        _fill(target, given["tensor"])


def _gather_object(given: Given, place: ReplicaNumber) -> None:
    if given.get("object_gather_list") is not None:
        given["object_gather_list"][:] = [given["obj"]] * place.size


def _scatter(given: Given, place: ReplicaNumber) -> None:
    pieces = given.get("scatter_list")
    if pieces:
        _fill(given["tensor"], pieces[place.rank])
    else:
        _unchanged(given, place)


def _scatter_object(given: Given, place: ReplicaNumber) -> None:
    objects = given.get("scatter_object_input_list")
    if objects:
        given["scatter_object_output_list"][0] = objects[place.rank]


def _nothing(given: Given, place: ReplicaNumber) -> None:
    pass


AS_IF_ALIKE: dict[str, Callable[[Given, ReplicaNumber], Any]] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "all_gather_single": _all_gather_into,
    "_all_gather_base": _all_gather_into,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_object": _all_gather_object,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    "broadcast": _unchanged,
    "broadcast_object_list": _nothing,
    "gather": _gather,
    "gather_object": _gather_object,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_into,
    "reduce_scatter_single": _reduce_scatter_into,
    "_reduce_scatter_base": _reduce_scatter_into,
    "scatter": _scatter,
    "scatter_object_list": _scatter_object,
    "send": _nothing,
    "isend": _nothing,
    "recv": _received,
    "irecv": _unchanged,
    "send_object_list": _nothing,
    "recv_object_list": _nothing,
}
"""Collectives of ``torch.distributed``, which write their results to their arguments."""


def _gathered_along(given: Given, place: ReplicaNumber) -> Tensor:
    return torch.cat([given["self"]] * place.size, given["gather_dim"])


def _reduced(given: Given, place: ReplicaNumber) -> Tensor:
    return _combined(given["self"], given["reduceOp"], place).clone()


def _scattered_along(given: Given, place: ReplicaNumber) -> Tensor:
    mine = given["self"].chunk(place.size, given["scatter_dim"])[place.rank]
    return _combined(mine, given["reduceOp"], place).contiguous()


def _exchanged_anew(given: Given, place: ReplicaNumber) -> Tensor:
    sizes, mine = given.get("output_split_sizes"), given["self"]
    if sizes:
        return mine.new_zeros(sum(sizes), *mine.shape[1:]) + 0 * mine.sum()
    return _exchanged(mine, given.get("input_split_sizes"), place)


def _same(given: Given, place: ReplicaNumber) -> Tensor:
    return given["self"].clone()


FUNCTIONAL_AS_IF_ALIKE: dict[str, Callable[[Given, ReplicaNumber], Tensor]] = {
    "all_gather_tensor": _gathered_along,
    "all_gather_single": _gathered_along,
    "all_gather_tensor_autograd": _gathered_along,
    "all_gather_single_autograd": _gathered_along,
    "all_reduce": _reduced,
    "reduce_scatter_tensor": _scattered_along,
    "reduce_scatter_single": _scattered_along,
    "reduce_scatter_tensor_autograd": _scattered_along,
    "reduce_scatter_single_autograd": _scattered_along,
    "all_to_all_single": _exchanged_anew,
    "all_to_all_single_autograd": _exchanged_anew,
    "broadcast": _same,
}
"""Collectives of ``torch.distributed._functional_collectives``, which return their results. Gradients pass through
those with ``autograd`` in their names."""
