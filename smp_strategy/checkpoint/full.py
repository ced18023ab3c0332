"""The whole model and optimizer as one process would have them.

Before the partition every rank has everything. After it, saving collects the stages' shares on global rank 0, and
loading lets every rank take its share out of the whole. What is spread is put together from the inside to the outside:
pieces of a shard group, parts of split layers, stages. Names, shapes and parameter numbers are those of the plain
module, so that a file written under one layout is read under any other, or by plain PyTorch.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.gather import collect
from smp_strategy.mesh import ProcessMesh
from smp_strategy.optim.state_pieces import cut_state, join_state, kept_per_element, split_state
from smp_strategy.optim.state_sharding import StateSharding
from smp_strategy.ownership import Ownership
from smp_strategy.sharding.sharded_units import ShardedUnits
from smp_strategy.stage_tensors import in_plain_sight
from smp_strategy.tensor_parallel.parts import Parts

__all__ = ["keep_share", "load_state_dict", "optimizer_state", "state_dict"]


def state_dict(
    module: nn.Module,
    ownership: Ownership | None,
    mesh: ProcessMesh,
    sharded: ShardedUnits | None = None,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """The whole state dict on global rank 0, ``{}`` elsewhere; collective. Tied parameters are one tensor in it."""
    if ownership is None:
        return module.state_dict() if mesh.rank == 0 else {}
    whole: dict[Any, Tensor] = {}
    takes_part = sharded is not None and (mesh.replicate_rank == 0 or sharded.deals_out)
    for values in sharded.values() if sharded is not None and takes_part else ():
        if mesh.dp_rank == 0:
            whole.update(values)
    with in_plain_sight():
        found = module.state_dict(keep_vars=True)
        items = {name: whole.get(v, v.detach()) if isinstance(v, Tensor) else v for name, v in found.items()}
    if parts is not None and mesh.dp_rank == 0:
        for name, tensor in found.items():
            if parts.has(tensor) and ownership.is_held(name, mesh.stage):
                joined = parts.join(tensor, items[name])
                items[name] = joined if mesh.tp_rank == 0 else None
    known = _gathered(list(items), mesh)
    savers = {name: ownership.saver(name) for name in _merged(known)}
    same = _tied_names(found)
    sent = {name: saver for name, saver in savers.items() if name in known[saver] and name not in same}
    collected = _collect(items, sent, mesh)
    if mesh.rank != 0:
        return {}
    state = OrderedDict((name, collected[same.get(name, name)]) for name in savers if same.get(name, name) in collected)
    state._metadata = found._metadata  # type: ignore[attr-defined]
    return state


def _tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """The names in a state dict, made with ``keep_vars``, of parameters that stand there before, and those first names.

    Every rank knows every parameter, so they are the same on all of them. Buffers may have been replaced.
    """
    first: dict[nn.Parameter, str] = {}
    same = {}
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and first.setdefault(tensor, name) != name:
            same[name] = first[tensor]
    return same


def optimizer_state(
    optimizer: Optimizer,
    ownership: Ownership,
    mesh: ProcessMesh,
    sharding: StateSharding,
    sharded: ShardedUnits | None = None,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """The whole ``optimizer.state_dict()`` on global rank 0, ``{}`` elsewhere; collective over all ranks."""
    state = optimizer.state_dict()
    parameters = _parameters(optimizer)
    if sharded is not None:
        whole = _whole_state(optimizer, {parameters[number]: kept for number, kept in state["state"].items()}, sharded)
        state["state"] = {
            number: {**kept, **whole.get(parameters[number], {})} for number, kept in state["state"].items()
        }
    if parts is not None:
        state["state"] = {
            number: _joined(kept, parameters[number], parts) if parts.has(parameters[number]) else kept
            for number, kept in sorted(state["state"].items())
        }
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, list(state["state"]))
    # Replica by replica from the last to the first, and stage by stage: global rank 0 is the last and collects.
    ranks = [mesh.shape.rank_at(replica, stage) for replica in reversed(range(mesh.dp)) for stage in range(mesh.pp)]
    savers = {}
    for number in sorted(set().union(*known)):
        stage = ownership.first_holder(parameters[number])
        replica = sharding.owner(parameters[number], stage)
        savers[str(number)] = ranks.index(mesh.shape.rank_at(replica, stage))
    items = {str(number): value for number, value in state["state"].items()}
    collected = collect(items, savers, ranks, None)
    if mesh.rank != 0:
        return {}
    return {**state, "state": {int(number): value for number, value in collected.items()}}


def load_state_dict(
    module: nn.Module,
    state: dict[str, Any],
    ownership: Ownership | None,
    mesh: ProcessMesh,
    sharded: ShardedUnits | None = None,
    parts: Parts | None = None,
    *,
    strict: bool,
) -> None:
    """Load this rank's share of a whole state dict.

    Raises:
        RuntimeError: ``strict`` and the names do not fit, as ``nn.Module.load_state_dict`` would.
    """
    if ownership is None:
        module.load_state_dict(state, strict=strict)
        return
    with in_plain_sight():
        own = module.state_dict(keep_vars=True)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if strict and (missing or unexpected):
        raise RuntimeError(f"The state dict does not fit the module: missing {missing}, unexpected {unexpected}.")
    # Every rank compares all shapes, so that all of them stop and not only the one that holds the tensor.
    shapes = {
        name: tensor.shape if parts is None else parts.whole_shape(tensor)
        for name, tensor in own.items()
        if isinstance(tensor, Tensor) and name in state
    }
    other = [
        f"{name} {list(state[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if state[name].shape != shape
    ]
    if other:
        raise RuntimeError(f"The state dict does not fit the module: {', '.join(other)}.")
    mine = OrderedDict((name, value) for name, value in state.items() if ownership.is_held(name, mesh.stage))
    if hasattr(state, "_metadata"):  # the versions of the modules that wrote it
        mine._metadata = state._metadata  # type: ignore[attr-defined]
    if parts is not None:
        mine.update({name: parts.part(own[name], mine[name]) for name in mine if parts.has(own.get(name))})
    if sharded is not None:
        spread = {name: tensor for name, tensor in own.items() if name in mine and sharded.has(tensor)}
        sharded.fill({tensor: mine.pop(name) for name, tensor in spread.items()})
    with in_plain_sight():
        module.load_state_dict(mine, strict=False)


def keep_share(
    optimizer: Optimizer, sharding: StateSharding, sharded: ShardedUnits | None = None, parts: Parts | None = None
) -> None:
    """Of whole optimizer state keep what this rank needs for the updates that it makes.

    Args:
        optimizer: has it.
        sharding: says what this rank updates.
        sharded: of which parameters it updates a piece.
        parts: of which parameters it has a part.
    """
    for parameter in _parameters(optimizer):
        if parameter not in optimizer.state:
            continue
        if not sharding.is_mine(parameter):
            del optimizer.state[parameter]
            continue
        if parts is not None and parts.has(parameter):
            kept = optimizer.state[parameter]
            kept.update(_cut(kept, parameter, parts))
        if sharded is not None and sharded.has(parameter):
            kept = optimizer.state[parameter]
            if _is_cut(kept, parameter, _piece_numel(parameter, sharded)):
                continue
            known = kept_per_element(optimizer, parameter) if parameter.numel() == 1 else {}
            kept.update(cut_state(kept, parameter.shape, partial(sharded.piece_of, parameter), known))


def _whole_state(
    optimizer: Optimizer, states: Mapping[nn.Parameter, Mapping[str, Any]], sharded: ShardedUnits
) -> dict[nn.Parameter, Any]:
    """The ``states`` of parameters of which ranks have pieces, put together. Collective."""
    alike: dict[nn.Parameter, Any] = {}
    pieces: dict[tuple[int, str], dict[nn.Parameter, Tensor]] = {}
    for parameter, state in states.items():
        if sharded.has(parameter):
            numel = _piece_numel(parameter, sharded)
            known = kept_per_element(optimizer, parameter) if numel == 1 else {}
            alike[parameter], tensors = split_state(state, numel, known)
            for number, tensor in enumerate(tensors):
                pieces.setdefault((number, str(tensor.dtype)), {})[parameter] = tensor
    found: dict[nn.Parameter, dict[int, Tensor]] = {parameter: {} for parameter in alike}
    for (number, _), values in sorted(pieces.items()):
        for whole in sharded.whole_of(values):
            for parameter, tensor in whole.items():
                found[parameter][number] = tensor
    return {each: join_state(alike[each], list(tensors.values())) for each, tensors in found.items() if tensors}


def _cut(state: Mapping[str, Any], parameter: nn.Parameter, parts: Parts) -> Any:
    """Of ``state`` for the whole of a split parameter, this rank's part; what is for its part is left as it is."""
    whole = parts.whole_shape(parameter)
    return pytree.tree_map(
        lambda leaf: parts.part(parameter, leaf) if isinstance(leaf, Tensor) and leaf.shape == whole else leaf,
        dict(state),
    )


def _joined(state: Mapping[str, Any], parameter: nn.Parameter, parts: Parts) -> Any:
    """``state`` for the whole of a split parameter. Collective over the ranks that have the parts."""
    mine = parts.shape(parameter)
    return pytree.tree_map(
        lambda leaf: parts.join(parameter, leaf) if isinstance(leaf, Tensor) and leaf.shape == mine else leaf,
        dict(state),
    )


def _is_cut(state: Mapping[str, Any], parameter: nn.Parameter, numel: int) -> bool:
    """Whether ``state`` is that for a piece of ``numel`` elements already: an earlier run has left it."""
    shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.ndim}
    return shapes == {(numel,)} != {tuple(parameter.shape)}


def _piece_numel(parameter: nn.Parameter, sharded: ShardedUnits) -> int:
    return sharded.piece_of(parameter, torch.empty(parameter.shape, device="meta")).numel()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters in the order of the numbers in its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gathered(items: list[Any], mesh: ProcessMesh) -> list[list[Any]]:
    """The ``items`` of every stage."""
    found: list[Any] = [None] * mesh.pp
    # The group lists its ranks in ascending order, not in that of the stages.
    dist.all_gather_object(found, (mesh.stage, items), group=mesh.pp_group)
    return [items for _, items in sorted(found, key=lambda pair: pair[0])]


def _merged(lists: list[list[str]]) -> list[str]:
    """All names, each at the place that it has where it is known: a stage may have buffers that others never see."""
    merged = list(lists[0])
    known = set(merged)
    for names in lists[1:]:
        for before, name in zip([None, *names], names, strict=False):
            if name not in known:
                merged.insert(merged.index(before) + 1 if before is not None else 0, name)
                known.add(name)
    return merged


def _collect(items: dict[str, Any], savers: dict[str, int], mesh: ProcessMesh) -> dict[str, Any]:
    """One replica is enough: the others hold the same. So is one of the ranks that split layers between them."""
    if mesh.dp_rank != 0 or mesh.tp_rank != 0:
        return {}
    return collect(items, savers, mesh.stage_ranks, mesh.pp_group)
