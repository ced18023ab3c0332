"""Consensus of all ranks before the first step: equal initial values, and a single partition."""

import hashlib
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import ConfigError, SMPError
from smp_strategy.model.deferred_tensor import DeferredTensor, lacks_values
from smp_strategy.planning.partition.partition import Partition

__all__ = ["agree_on", "start_alike"]


def start_alike(module: nn.Module, *, may_lack_values: bool = False) -> int:
    """Broadcast the parameters and buffers of rank 0 to all ranks; collective.

    Args:
        module: Module to train.
        may_lack_values: Whether tensors may be on the meta device, the same ones on all ranks.

    Returns:
        A seed that is equal on all ranks: that of rank 0's generator.

    Raises:
        ConfigError: tensors are on the meta device, and may not be; or a lazy layer has no shapes yet.
        SMPError: ranks have different tensors on the meta device, different parameters, or train different ones.
    """
    tensors = {tensor: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    _refuse_lazy([name for tensor, name in tensors.items() if is_lazy(tensor)])
    _agree_on_meta([name for tensor, name in tensors.items() if lacks_values(tensor)], may_lack_values)
    _refuse_different([(name, _described(tensor)) for tensor, name in tensors.items()])
    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64, device="cpu")
    collectives.broadcast(seed, 0, group=None, doing="the seed of rank 0").wait()
    with torch.no_grad():
        for tensor in tensors:
            if not lacks_values(tensor):
                collectives.broadcast(tensor.detach(), 0, group=None, doing="the weights of rank 0").wait()
    return int(seed)


def _described(tensor: Tensor) -> str:
    # Values that are read later cannot be broadcast from rank 0.
    history = tensor.history if isinstance(tensor, DeferredTensor) else ()
    changes = f", changed by {' and '.join(history)}" if history else ""
    is_trained = "trained" if tensor.requires_grad else "not trained"
    return f"of shape {list(tensor.shape)}, {tensor.dtype}, {is_trained}{changes}"


def _refuse_lazy(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(
            f"`{names[0]}` belongs to a lazy layer that has not seen an input yet ({len(names)} tensors have no "
            "shape), and the model is laid out over the ranks by its shapes. Call the model once with a batch, or with "
            f"`torch.zeros` of the size of one, under `torch.no_grad()`: {door_words().first_pass}."
        )


def _refuse_different(described: Sequence[tuple[str, str]]) -> None:
    digest = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
    digests = collectives.gather_objects(digest, "a comparison of the ranks' models")
    if len(set(digests)) == 1:
        return
    found = collectives.gather_objects(described, "a comparison of the ranks' parameters")
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = itertools.zip_longest(found[0], found[rank], fillvalue=("nothing", "which it has not"))
    (mine, is_so), (theirs, is_other) = next((one, other) for one, other in pairs if one != other)
    raise SMPError(
        f"Ranks have different models: where rank 0 has `{mine}` ({is_so}), rank {rank} has `{theirs}` ({is_other}). "
        "Build the same model on every rank, and freeze the same parameters."
    )


def _agree_on_meta(names: Sequence[str], may_lack_values: bool) -> None:
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    found = collectives.gather_objects((digest, len(names), names[:1]), "the beginning of training")
    some = next((first[0] for _, _, first in found if first), None)
    if some is not None and not may_lack_values:
        raise ConfigError(
            f"`{some}` is on the meta device and has no values. Set `delayed_parameter_initialization=True`, so that "
            "every rank gives values to its own share of the model, or build the model on a real device."
        )
    if len({digest for digest, _, _ in found}) > 1:
        counts = [count for _, count, _ in found]
        raise SMPError(
            f"Ranks have different tensors on the meta device: `{some}`, for example; by rank, so many: {counts}. "
            "Build the same model on every rank."
        )


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
