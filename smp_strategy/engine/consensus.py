"""Consensus of all ranks before the first step: equal initial values, and a single partition."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import META_TENSORS, MODEL, refused_meta
from smp_strategy.errors import SMPError
from smp_strategy.model.deferred_tensor import DeferredTensor, lacks_values
from smp_strategy.planning.partition.partition import Partition

__all__ = ["agree_on", "start_alike"]


def start_alike(module: nn.Module, ledger: Ledger, *, may_lack_values: bool = False) -> int:
    """Broadcast the parameters and buffers of rank 0 to all ranks; collective.

    Args:
        module: Module to train.
        ledger: Earlier notes, compared together with the model.
        may_lack_values: Whether tensors may be on the meta device, the same ones on all ranks.

    Returns:
        A seed that is equal on all ranks: that of rank 0's generator.

    Raises:
        ConfigError: tensors are on the meta device, and may not be.
        SMPError: ranks have different tensors on the meta device, different parameters, or train different ones.
    """
    tensors = {tensor: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    without_values = [name for tensor, name in tensors.items() if lacks_values(tensor)]
    ledger.note(META_TENSORS, (may_lack_values, without_values))
    ledger.note(MODEL, [(name, _described(tensor)) for tensor, name in tensors.items()])
    ledger.compare("the beginning of training")
    if without_values and not may_lack_values:
        raise refused_meta(without_values[0])
    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64, device="cpu")
    collectives.broadcast(seed, 0, group=None, doing="the seed of rank 0").wait()
    with torch.no_grad():
        for tensor in tensors:
            if not lacks_values(tensor):
                collectives.broadcast(tensor.detach(), 0, group=None, doing="the weights of rank 0").wait()
    return int(seed)


def _described(tensor: Tensor) -> str:
    shape = "of unknown shape" if is_lazy(tensor) else f"of shape {list(tensor.shape)}"
    # Values that are read later cannot be broadcast from rank 0.
    history = tensor.history if isinstance(tensor, DeferredTensor) else ()
    changes = f", changed by {' and '.join(history)}" if history else ""
    return f"{shape}, {tensor.dtype}, {'trained' if tensor.requires_grad else 'not trained'}{changes}"


def agree_on(partition: Partition, used_by_glue: Sequence[str]) -> tuple[Partition, list[str]]:
    """Agree on a single partition for all ranks; collective.

    Replicas read different batches. Their shapes, and values if a step depends on them, lead to different costs and
    paths. So all ranks take the partition of rank 0, and hold each tensor that code above the units uses on any rank.

    Args:
        partition: Partition that this rank has found.
        used_by_glue: Names of tensors of units that code above the units uses here.

    Raises:
        SMPError: the modules of the ranks have different units.
    """
    found = collectives.gather_objects((partition, list(used_by_glue)), "the decision about the partition")
    units = [sorted(theirs.stage_of) for theirs, _ in found]
    differing = [rank for rank, names in enumerate(units) if names != units[0]]
    if differing:
        name = min(set(units[0]) ^ set(units[differing[0]]))
        raise SMPError(
            f"Ranks {differing} have other units than rank 0: `{name}`, for example, is not on all of them. Build the "
            "same model on every rank."
        )
    return found[0][0], sorted({name for _, names in found for name in names})
