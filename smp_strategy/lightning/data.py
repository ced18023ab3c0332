"""Every rank of a replica reads the same batches, in the order in which one process would read them.

Each rank reads its own data and nothing is sent, so the ranks of one replica must agree on every random draw on the
way to a batch: the order of samples, seeds of workers, augmentation in the dataset and in ``on_after_batch_transfer``.
Two things stand against that: nobody may have seeded anything, and the stages draw from the same global generators for
dropout, each another number of times.

[Note: data stream] So the data path has a state of the generators for itself.

1. When a data loader is iterated, all ranks of the replica take over the generators of the replica's first rank.
2. Each draw of the data path afterwards starts where the last one of the data path ended.
3. As long as nobody else draws, that is the global state itself, and it moves along: without dropout the run sees
   exactly the numbers that one process sees.

What cannot be steered (an iterable dataset that splits its samples by rank, a dataset with generators of its own) is
found by comparing a checksum of the first batches.

With ``prescaled_batch=False`` each of the ranks that split layers between them reads samples of its own, like a
replica; then it is the stages with the same part of layers that read alike. The others need its samples in each step,
so those that run out of batches before others do, say so.
"""

import copy
import os
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from smp_strategy.errors import SMPError
from smp_strategy.lightning.factory import Tree
from smp_strategy.mesh import ProcessMesh

__all__ = ["DataStream", "checksum", "following"]

_CHECKED_BATCHES = 2
_END = object()

RngState = tuple[bytes, Any, Any]


class DataStream:
    """The random numbers of the data path. See [Note: data stream].

    Args:
        mesh: its replicas are the ranks that must agree.
        is_joint: ranks that split layers between them read alike, too.
    """

    def __init__(self, mesh: ProcessMesh, *, is_joint: bool = True) -> None:
        self._is_joint = is_joint or mesh.tp == 1
        self._axes = ("pp", "tp") if self._is_joint else ("pp",)
        self._ranks = tuple(mesh.shape.group(mesh.rank, *self._axes))
        # Its groups are not kept: they must end before the process does. See [Note: leaving].
        self._mesh = mesh
        self._num_ranks = len(self._ranks)
        self._state = _global_state()
        self._num_checked = 0

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._mesh.replica_group if self._is_joint else self._mesh.pp_group

    def follow_first_rank(self, *generators: torch.Generator) -> None:
        """Take over the global generators, and ``generators``, of the replica's first rank. Collective."""
        if self._num_ranks > 1:
            states = (_global_state(), [generator.get_state() for generator in generators])
            first = self._ranks[0]
            box = [states if self._mesh.rank == first else None]
            dist.broadcast_object_list(box, src=first, group=self._group)
            assert box[0] is not None
            _set_global_state(box[0][0])
            for generator, state in zip(generators, box[0][1], strict=True):
                generator.set_state(state)
        self._state = _global_state()
        self._num_checked = 0

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Random numbers drawn while this is open belong to the data path."""
        others = _global_state()
        nobody_else_drew = others == self._state
        if not nobody_else_drew:
            _set_global_state(self._state)
        try:
            yield
        finally:
            self._state = _global_state()
            if not nobody_else_drew:
                _set_global_state(others)

    def check(self, batch: Any) -> None:
        """Compare the first batches of each pass over the data between the ranks of the replica. Collective.

        Raises:
            SMPError: they differ.
        """
        if self._num_ranks == 1 or self._num_checked == _CHECKED_BATCHES:
            return
        found: list[int] = [0] * self._num_ranks
        dist.all_gather_object(found, checksum(batch), group=self._group)
        if len(set(found)) > 1:
            raise SMPError(
                f"Batch {self._num_checked} differs between the ranks of one replica {self._ranks}, which "
                "must all read the same samples. A dataset that picks its samples by rank must use the data-parallel "
                "rank (`trainer.strategy.distributed_sampler_kwargs`) instead of `trainer.global_rank`; one with "
                "random generators of its own must seed them alike."
            )
        self._num_checked += 1

    def compare(self, what: Any) -> None:
        """Compare the number of batches that each rank will read, or whether it has read one. Collective.

        Raises:
            SMPError: ranks whose samples belong together differ, on all of them.
        """
        if self._is_joint:
            return
        found: list[Any] = [None] * self._mesh.tp
        dist.all_gather_object(found, what, group=self._mesh.tp_group)
        if any(each != found[0] for each in found):
            raise SMPError(
                f"With `prescaled_batch=False` a step needs samples of all ranks of a tensor-parallel group, but they "
                f"do not have the same number of batches ({', '.join(map(str, found))}). Let the dataset give each "
                "rank as many, as data-parallel training needs it as well."
            )


def following(loader: DataLoader[Any], stream: DataStream, tree: Tree, *, dp_rank: int) -> DataLoader[Any]:
    """A copy of ``loader`` whose draws come from ``stream``; the user's own loader stays as it is."""
    twin = copy.copy(loader)
    stock = type(loader)
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    twin.__class__ = type(stock.__name__, (_FollowingLoader, stock), names)
    twin.smp_stream = stream
    if twin.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        # Lightning would seed workers by global rank: each stage would augment in another way.
        seed_worker = tree.fabric("utilities.seed").pl_worker_init_function
        twin.worker_init_fn = partial(seed_worker, rank=dp_rank)
    return twin


class _FollowingLoader(DataLoader[Any]):
    smp_stream: DataStream

    def __iter__(self) -> Any:
        holders = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        own = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        self.smp_stream.follow_first_rank(*own.values())
        with self.smp_stream.draws():
            inner = super().__iter__()
        return _FollowingIterator(inner, self.smp_stream)


class _FollowingIterator:
    def __init__(self, inner: Iterator[Any], stream: DataStream) -> None:
        self._inner = inner
        self._stream = stream
        self._is_new = True

    def __iter__(self) -> "_FollowingIterator":
        return self

    def __next__(self) -> Any:
        if self._is_new:
            # Lightning does not ask for more batches than there are, so ranks that have fewer would stop asking.
            self._is_new = False
            try:
                self._stream.compare(len(self))
            except TypeError:  # an iterable dataset does not know
                self._stream.compare("an unknown number")
        with self._stream.draws():
            found = next(self._inner, _END)
        self._stream.compare("none left" if found is _END else "one more")
        if found is _END:
            raise StopIteration
        return found

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]


def checksum(batch: Any) -> int:
    """A number that depends on every tensor, number and string in ``batch``, and on their order."""
    found = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), found)
            content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found = zlib.crc32(content.numpy().data, found)
        elif isinstance(leaf, (bool, int, float, str, bytes)):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def _global_state() -> RngState:
    numpy = sys.modules.get("numpy")  # whoever draws from it has imported it
    state = numpy.random.get_state(legacy=True) if numpy is not None else None
    if state is not None:
        state = (state[0], state[1].tobytes(), *state[2:])
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state


def _set_global_state(state: RngState) -> None:
    for_torch, for_python, for_numpy = state
    torch.set_rng_state(torch.frombuffer(bytearray(for_torch), dtype=torch.uint8))
    random.setstate(for_python)
    if for_numpy is not None:
        import numpy

        key = numpy.frombuffer(for_numpy[1], dtype=numpy.uint32)
        numpy.random.set_state((for_numpy[0], key, *for_numpy[2:]))
