"""Every rank of a replica reads the same batches, in the order in which one process would read them.

Ranks that must read alike (:mod:`smp_strategy.distributed.rng_sync`) draw from global generators, also for augmentation
in ``on_after_batch_transfer``. But the stages draw from the same ones for dropout, each another number of times.

[Note: data stream] So the data path has a state of the generators for itself.

1. When a data loader is iterated, all ranks of the replica take over the generators of the replica's first rank.
2. Each draw of the data path afterwards starts where the last one of the data path ended.
3. As long as nobody else draws, that is the global state itself, and it moves along: without dropout the run sees
   exactly the numbers that one process sees.

With ``prescaled_batch=False`` each of the ranks that split layers between them reads samples of its own, like a
replica; then it is the stages with the same part of layers that read alike. The others need its samples in each step,
so those that run out of batches before others do, say so.
"""

import copy
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.rng_state import RngState, global_state, set_global_state
from smp_strategy.distributed.rng_sync import BatchSource, DataReaders
from smp_strategy.integrations.data.resumable_loader import follow
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["DataRngSync", "following"]

_MOST_AHEAD = 64
_ADVICE = (
    "A dataset that picks its samples by rank must use the data-parallel rank "
    "(`trainer.strategy.distributed_sampler_kwargs`) instead of `trainer.global_rank`"
)


class DataRngSync(DataReaders):
    """The random numbers of the data path. See [Note: data stream].

    Args:
        mesh: its replicas are the ranks that must agree.
        is_joint: ranks that split layers between them read alike, too.

    Attributes:
        data_ranks: for each share of the samples the global ranks that read it.
    """

    def __init__(self, mesh: ProcessMesh, *, is_joint: bool = True) -> None:
        is_joint = is_joint or mesh.tp == 1
        axes = ("pp", "tp") if is_joint else ("pp",)
        self.data_ranks = mesh.shape.groups(*axes)
        # The mesh is asked each time: its groups must not be kept. See [Note: leaving].
        super().__init__(
            mesh.shape.group(mesh.rank, *axes),
            mesh.rank,
            lambda: mesh.replica_group if is_joint else mesh.pp_group,
            advice=_ADVICE,
            partners=None if is_joint else lambda: mesh.tp_group,
        )
        self._state = global_state()
        # Of the latest batches of all loaders, of which Lightning uses several at once, and fetches some ahead.
        self._arrived: deque[tuple[weakref.ref[Tensor], BatchSource]] = deque(maxlen=_MOST_AHEAD)

    def begin(self, *generators: torch.Generator) -> None:
        """Take over the global generators, and ``generators``, of the replica's first rank. Collective."""
        self.take_over(*generators)
        self.go_on()
        self._state = global_state()

    def state(self) -> RngState:
        """Where the next draw of the data path starts."""
        return self._state

    def set_state(self, state: RngState) -> None:
        """Let the next draw of the data path start there."""
        self._state = state

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Random numbers drawn while this is open belong to the data path."""
        others = global_state()
        nobody_else_drew = others == self._state
        if not nobody_else_drew:
            set_global_state(self._state)
        try:
            yield
        finally:
            self._state = global_state()
            if not nobody_else_drew:
                set_global_state(others)

    def arrived(self, batch: Any, read: BatchSource | None) -> None:
        """Note what is known of ``batch``; it is compared where Lightning moves it, whatever it comes from."""
        tensor = _tensor_in(batch)
        if tensor is not None and read is not None:
            self._arrived.append((weakref.ref(tensor), read))

    def read_of(self, batch: Any) -> BatchSource | None:
        """What a loader knows of ``batch``, if it is a loader's and has a tensor."""
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
        # Lightning would seed workers by global rank: each stage would augment in another way.
        seed_worker = tree.fabric("utilities.seed").pl_worker_init_function
        twin.worker_init_fn = partial(seed_worker, rank=dp_rank)
    return twin
