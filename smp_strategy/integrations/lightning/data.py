"""Data loading: all ranks of a replica read the same batches, in the order of a single process.

Ranks that must read alike (:mod:`smp_strategy.engine.data_readers`) draw from global generators, also for augmentation
in ``on_after_batch_transfer``. Dropout on the stages draws from the same generators, a different number of times each.

[Note: data stream] The data path therefore has generator states of its own.

1. When a data loader is iterated, all ranks of the replica take over the generators of the replica's first rank.
2. Each later draw of the data path starts where the previous one ended.
3. While nothing else draws, the global state moves along with the stream: without dropout the run sees exactly the
   numbers of a single process.

With ``prescaled_batch=False`` each tensor-parallel rank reads samples of its own, like a replica; the stages with the
same part of the layers then read alike. Every step needs the samples of all of them, so a rank that runs out of batches
early reports it.
"""

import copy
import os
import weakref
from collections import deque
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from smp_strategy.engine.data_readers import BatchSource, OwnStream
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.resumable_loader import follow
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["DataRngSync", "following"]

_MOST_AHEAD = 64
_ADVICE = (
    "A dataset that picks its samples by rank must use the data-parallel rank "
    "(`trainer.strategy.distributed_sampler_kwargs`) instead of `trainer.global_rank`"
)


class DataRngSync(OwnStream):
    """The random number stream of the data path. See [Note: data stream].

    ``is_joint``: tensor-parallel ranks read alike, too. ``data_ranks``: the global ranks that read each share of the
    samples.
    """

    def __init__(self, engine: Engine, *, is_joint: bool = True, shares: bool = False) -> None:
        mesh = engine.mesh
        is_joint = is_joint or mesh.tp == 1
        axes = ("pp", "tp") if is_joint else ("pp",)
        self.data_ranks = mesh.shape.groups(*axes)
        # Callables instead of groups: nothing may keep a process group alive. See [Note: leaving].
        super().__init__(
            mesh.shape.group(mesh.rank, *axes),
            mesh.rank,
            lambda: mesh.replica_group if is_joint else mesh.pp_group,
            advice=_ADVICE,
            partners=None if is_joint else lambda: mesh.tp_group,
            shares=shares,
        )
        # Sources of recent batches: Lightning uses several loaders at once, and prefetches.
        self._arrived: deque[tuple[weakref.ref[Tensor], BatchSource]] = deque(maxlen=_MOST_AHEAD)

    def arrived(self, batch: Any, read: BatchSource | None) -> tuple[Any, BatchSource | None]:
        """Record the source of ``batch``; ranks compare it when Lightning moves the batch to the device."""
        tensor = _tensor_in(batch)
        if tensor is not None and read is not None:
            self._arrived.append((weakref.ref(tensor), read))
        return batch, read

    def read_of(self, batch: Any) -> BatchSource | None:
        """The source of ``batch``, or ``None`` if no loader made it or it has no tensor."""
        tensors = {id(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        reads = [read for found, read in self._arrived if id(found()) in tensors]
        if not reads:
            return None
        return reads[0]._replace(others=tuple(sorted({read.number for read in reads} - {reads[0].number})))


def _tensor_in(batch: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)


def following(loader: DataLoader[Any], stream: DataRngSync, tree: Tree, *, dp_rank: int) -> DataLoader[Any]:
    """A copy of ``loader`` whose draws come from ``stream``; the user's own loader stays as it is."""
    twin = copy.copy(loader)
    follow(twin, stream)
    if twin.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        # Lightning seeds workers by global rank, so each stage would augment differently.
        seed_worker = tree.fabric("utilities.seed").pl_worker_init_function
        twin.worker_init_fn = partial(seed_worker, rank=dp_rank)
    return twin
