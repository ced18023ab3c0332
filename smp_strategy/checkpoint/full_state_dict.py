"""Full state dict: gathers sharded model and optimizer state on global rank 0, and takes shares of it.

Names, shapes and parameter numbers are those of the unpartitioned module, so a file written under one layout is read
under any other, or by plain PyTorch.

[Note: gathering a state] All ranks offer the rectangles that they hold. The first rank that has a rectangle sends it,
and rank 0 receives one after the other straight into the result, so no rank ever holds more than the result plus one
tensor.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.load import by_parameter, decoded
from smp_strategy.checkpoint.sources import WholeState, flattened
from smp_strategy.checkpoint.state_dict import LocalShards, encoded, gradient_state, module_state, optimizer_state
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, WholeObject
from smp_strategy.data_parallel.optimizer_state import cut_state, kept_per_element
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.data_parallel.zero1 import ZeroOptimizer
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.model.guarded_tensors import in_plain_sight
from smp_strategy.model.shard_layout import Rectangle
from smp_strategy.tensor_parallel.split_module import ParameterParts

__all__ = [
    "EntryOffer",
    "collect",
    "gradients",
    "held_optimizer_entries",
    "keep_share",
    "merged",
    "numbered",
    "numbers_of",
    "offer_of",
    "on_all_ranks",
    "optimizer_state_dict",
    "optimizer_state_on_all_ranks",
    "state_dict",
    "whole_optimizer_state_dict",
]

_PART, _STATE = "a part of a state", "a state that rank 0 has collected"


class EntryOffer(NamedTuple):
    """One rank's share of one entry of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """``None``: the entry is no tensor."""
    aliases: tuple[str, ...]
    rectangles: tuple[Rectangle, ...]
    value: Any = None
    """Value of an entry that is no tensor."""


def collect(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gather a sharded state on global rank 0. Collective over all ranks.

    Args:
        state: Entries of this rank by their names; a :class:`~smp_strategy.checkpoint.storage.held_tensor.HeldTensor`
            for each tensor.

    Returns:
        Every entry on global rank 0, tensors on the host, in an order in which each rank's entries stand as on that
        rank; tied tensors are one. ``{}`` elsewhere.
    """
    mine = {name: offer_of(value) for name, value in state.items()}
    offers = collectives.gather_objects(mine, "the collection of a state")
    rank = dist.get_rank()
    result = _Result(merged(offers), offers) if rank == 0 else None
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for source, entries in enumerate(offers):
        for name, offer in entries.items():
            for number, rectangle in enumerate(offer.rectangles):
                if (name, rectangle.offsets) in seen:
                    continue
                # All ranks walk the offers in the same order, so sends and receives match without further talk.
                seen.add((name, rectangle.offsets))
                block = state[name].blocks[number].tensor if source == rank else None
                if result is not None:
                    result.take(name, rectangle, block, source)
                elif block is not None:
                    collectives.send(_on_host(block), 0, _PART)
    return {} if result is None else result.entries()


def on_all_ranks(collected: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcast the result of :func:`collect` from global rank 0. Collective over all ranks."""
    offers = collectives.tell({name: offer_of(_held(value)) for name, value in collected.items()}, 0, _STATE)
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
    return HeldTensor.whole(value) if isinstance(value, Tensor) else value


class _Result:
    """Gathered state on rank 0."""

    def __init__(self, names: Iterable[str], offers: list[dict[str, EntryOffer]]) -> None:
        self._first = {name: next(entries[name] for entries in offers if name in entries) for name in names}
        self._tensors = {
            name: torch.empty(offer.shape, dtype=offer.dtype, device="cpu")
            for name, offer in self._first.items()
            if offer.dtype is not None
        }

    def take(self, name: str, rectangle: Rectangle, block: Tensor | None, source: int) -> None:
        """Fill a rectangle from this rank's ``block``, or by receiving it from ``source``."""
        place = rectangle.view_of(self._tensors[name])
        if block is not None:
            place.copy_(block)
        elif place.is_contiguous():
            collectives.receive(place, source, _PART)
        else:
            received = torch.empty(rectangle.sizes, dtype=place.dtype, device="cpu")
            collectives.receive(received, source, _PART)
            place.copy_(received)

    def entries(self) -> dict[str, Any]:
        """All entries, under all their names."""
        found: dict[str, Any] = {}
        for name, offer in self._first.items():
            found[name] = self._tensors.get(name, offer.value)
            found.update((alias, found[name]) for alias in offer.aliases)
        return found


def offer_of(value: Any) -> EntryOffer:
    """The offer of an entry that this rank has."""
    if not isinstance(value, HeldTensor):
        return EntryOffer((), None, (), (), value.value if isinstance(value, WholeObject) else value)
    return EntryOffer(value.shape, value.dtype, value.aliases, tuple(block.place for block in value.blocks))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def merged(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names in an order that agrees with each list where possible: a rank may have entries that others never
    see."""
    merged: list[str] = []
    known: set[str] = set()
    for names in map(list, lists):
        for before, name in zip([None, *names], names, strict=False):
            if name not in known:
                merged.insert(merged.index(before) + 1 if before is not None else 0, name)
                known.add(name)
    return merged


def state_dict(holdings: LocalShards) -> dict[str, Any]:
    """The full state dict on global rank 0, ``{}`` elsewhere; collective. Tied parameters are one tensor in it."""
    collected = collect(module_state(holdings))
    if not collected:
        return {}
    with in_plain_sight():
        found = holdings.module.state_dict(keep_vars=True)
    state = OrderedDict((name, collected[name]) for name in merged([found, collected]) if name in collected)
    state._metadata = found._metadata  # type: ignore[attr-defined]
    return state


def optimizer_state_dict(holdings: LocalShards, optimizer: Optimizer) -> dict[str, Any]:
    """The full ``optimizer.state_dict()`` on global rank 0, ``{}`` elsewhere; collective over all ranks."""
    collected = collect(held_optimizer_entries(holdings, optimizer))
    return whole_optimizer_state_dict(optimizer, collected) if holdings.mesh.rank == 0 else {}


def held_optimizer_entries(holdings: LocalShards, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's share of the state of ``optimizer``, by numbers of parameters: ``0.exp_avg``."""
    return flattened(optimizer_state(holdings, optimizer, numbers_of(optimizer))["state"])


def whole_optimizer_state_dict(optimizer: Optimizer, entries: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` of a single process, with whole ``entries``, named as in
    :func:`held_optimizer_entries`."""
    numbers = numbers_of(optimizer)
    state = {int(numbers[parameter]): kept for parameter, kept in _by_parameter(entries, numbers).items()}
    return {**optimizer.state_dict(), "state": dict(sorted(state.items()))}


def optimizer_state_on_all_ranks(holdings: LocalShards, optimizer: Optimizer) -> defaultdict[Any, Any]:
    """The full ``optimizer.state`` on every rank, in memory of its own; collective over all ranks."""
    numbers = numbers_of(optimizer)
    collected = on_all_ranks(collect(held_optimizer_entries(holdings, optimizer)))
    state: defaultdict[Any, Any] = defaultdict(dict)
    found = _by_parameter(collected, numbers)
    for parameter in [each for each in numbers if each in found]:
        device = parameter.device
        # Scalars (numbers of steps) stay on the host.
        state[parameter] = pytree.tree_map(
            lambda leaf, to=device: leaf.to(to) if isinstance(leaf, Tensor) and leaf.ndim else leaf, found[parameter]
        )
    state.update((key, kept) for key, kept in optimizer.state.items() if key not in holdings.names)
    return state


def _by_parameter(
    collected: Mapping[str, Any], numbers: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, dict[str, Any]]:
    found = by_parameter(collected, "", {number: parameter for parameter, number in numbers.items()})
    return {
        parameter: decoded({key: collected[name] for key, name in names.items()}) for parameter, names in found.items()
    }


def gradients(holdings: LocalShards) -> dict[str, Tensor]:
    """The full gradients on global rank 0, ``{}`` elsewhere; collective over all ranks."""
    return collect(gradient_state(holdings))


def numbered(state: Mapping[str, Any]) -> WholeState:
    """The result of ``optimizer.state_dict()`` as a source: state of optimizer 0, parameters by :func:`numbers_of`."""
    kept = {str(number): encoded(value, lambda _, leaf: leaf) for number, value in state["state"].items()}
    groups = [{**group, "params": [str(number) for number in group["params"]]} for group in state["param_groups"]]
    return WholeState(flattened({"optimizer_0": {"state": kept, "param_groups": groups}}))


def numbers_of(optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """The number of each parameter in ``optimizer.state_dict()``."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: str(number) for number, parameter in enumerate(parameters)}


def keep_share(
    optimizer: Optimizer,
    sharding: ZeroOptimizer,
    sharded: ShardedModule | None = None,
    parts: ParameterParts | None = None,
) -> None:
    """Shard full optimizer state in place: keep this rank's share.

    Args:
        optimizer: Optimizer with full state.
        sharding: Tells which parameters this rank updates.
        sharded: Parameters of which this rank updates a run of elements.
        parts: Parameters of which this rank has a tensor-parallel part.
    """
    for parameter in numbers_of(optimizer):
        if parameter not in optimizer.state or not sharding.knows(parameter):
            continue
        if not sharding.is_mine(parameter):
            del optimizer.state[parameter]
            continue
        if parts is not None and parts.has(parameter):
            kept = optimizer.state[parameter]
            kept.update(_cut(kept, parameter, parts))
        if sharded is not None and sharded.has(parameter):
            kept = optimizer.state[parameter]
            if _is_cut(kept, parameter, sharded.own_piece(parameter).numel):
                continue
            known = kept_per_element(optimizer, parameter) if parameter.numel() == 1 else {}
            kept.update(cut_state(kept, parameter.shape, partial(sharded.piece_of, parameter), known))


def _cut(state: Mapping[str, Any], parameter: nn.Parameter, parts: ParameterParts) -> Any:
    """This rank's part of full ``state`` of a split parameter; state of a part is left as it is."""
    whole = parts.whole_shape(parameter)
    return pytree.tree_map(
        lambda leaf: parts.part(parameter, leaf) if isinstance(leaf, Tensor) and leaf.shape == whole else leaf,
        dict(state),
    )


def _is_cut(state: Mapping[str, Any], parameter: nn.Parameter, numel: int) -> bool:
    """Whether ``state`` is that of a run of ``numel`` elements already, left by an earlier run."""
    shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.ndim}
    return shapes == {(numel,)} != {tuple(parameter.shape)}
