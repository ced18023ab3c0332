"""Parts of state dicts as plain objects, which any file can have, and state dicts put together from parts.

A tensor of which a rank has only some rectangles is a dict of its shape and these rectangles, so that a part can be
written by ``torch.save``.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint import full_state_dict as full
from smp_strategy.checkpoint.sources import flattened
from smp_strategy.checkpoint.state_dict import module_state, optimizer_state
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, WholeObject
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.checkpointing import own_state_dict
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle

__all__ = ["model_part", "optimizer_part", "put_together", "whole_model", "whole_optimizer"]

_SHAPE, _BLOCKS, _ALIASES = "_smp_shape", "_smp_blocks", "_smp_aliases"


def model_part(engine: Engine) -> dict[str, Any]:
    """This rank's part of the state dict of the module, in memory of its own."""
    holdings = engine.local_model.holdings
    with engine.views.put_aside():
        engine.local_model.settle()
        state = module_state(holdings)
        if not holdings.speaks_for_replicas:
            for name, value in own_state_dict(holdings.module).items():
                if not isinstance(value, torch.nn.Parameter) and holdings.ownership.saver(name) == holdings.mesh.stage:
                    state[name] = HeldTensor.whole(value.detach()) if isinstance(value, Tensor) else WholeObject(value)
        return {name: _portable(value) for name, value in state.items()}


def optimizer_part(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part of the state of ``optimizer``, by numbers of parameters: ``0.exp_avg``."""
    with engine.views.put_aside():
        state = optimizer_state(engine.local_model.holdings, optimizer, full.numbers_of(optimizer))["state"]
        return {name: _portable(value) for name, value in flattened(state).items()}


def whole_model(module: nn.Module, entries: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """State dict of ``module`` with whole ``entries``, in its order."""
    plain = own_state_dict(module)
    state = OrderedDict((name, entries[name]) for name in plain if name in entries)
    state._metadata = plain._metadata  # type: ignore[attr-defined]
    return state


def whole_optimizer(optimizer: Optimizer, entries: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` of a single process, with whole ``entries``."""
    return full.whole_optimizer_state_dict(optimizer, entries)


def _portable(value: Any) -> Any:
    """A part's entry as plain objects that own their memory."""
    if isinstance(value, WholeObject):
        return value.value
    if not isinstance(value, HeldTensor):
        return value
    blocks = [(tuple(block.offsets), block.tensor.detach().to("cpu", copy=True)) for block in value.blocks]
    if len(blocks) == 1 and tuple(blocks[0][1].shape) == value.shape and not value.aliases:
        return blocks[0][1]
    return {_SHAPE: tuple(value.shape), _BLOCKS: blocks, _ALIASES: tuple(value.aliases)}


def _is_cut(value: Any) -> bool:
    return isinstance(value, Mapping) and _BLOCKS in value


def put_together(
    part: Mapping[str, Any], doing: str, group: dist.ProcessGroup, *, on_first_only: bool = False
) -> dict[str, Any]:
    """All parts put together, on all ranks of ``group``, which have them, or on the first only: the others get an empty
    dict. Collective.
    """
    if on_first_only:
        first = dist.get_process_group_ranks(group)[0]
        parts = collectives.collect(dict(part), first, doing, group)
    else:
        parts = collectives.gather_objects(dict(part), doing, group)
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in parts for name in each):
        _put(found, name, [each[name] for each in parts if name in each])
    return found


def _put(found: dict[str, Any], name: str, entries: Sequence[Any]) -> None:
    """Put the tensor of several ranks' ``entries`` into ``found``, under all of its names."""
    cut = [each for each in entries if _is_cut(each)]
    if len(cut) < len(entries):  # a rank has all of it, and others perhaps nothing
        found[name] = next(each for each in entries if not _is_cut(each))
        return
    shape = tuple(cut[0][_SHAPE])
    blocks = [(tuple(offsets), block) for each in cut for offsets, block in each[_BLOCKS]]
    found[name] = _assembled(name, shape, blocks)
    found.update((alias, found[name]) for alias in cut[0][_ALIASES])


def _assembled(name: str, shape: tuple[int, ...], blocks: Iterable[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    blocks = list(blocks)
    whole = torch.empty(shape, dtype=blocks[0][1].dtype)
    distinct = {offsets: block for offsets, block in blocks if block.numel()}
    if sum(block.numel() for block in distinct.values()) != whole.numel():
        raise CheckpointError(
            f"The parts of `{name}` make {sum(block.numel() for block in distinct.values())} of {whole.numel()} "
            "elements: some of the ranks that wrote them are missing. Load the parts with as many ranks and the same "
            "degrees, or use `smp.save_checkpoint`, whose files any layout reads."
        )
    for offsets, block in distinct.items():
        Rectangle(offsets, tuple(block.shape)).view_of(whole).copy_(block)
    return whole
