"""Distributed data loading under Accelerate: loaders are sharded over replicas, and all ranks of a replica read alike.

Accelerate shards samples by ``num_processes`` and ``process_index``. The hooks return the number and index of the data
ranks there, so Accelerate's own code does the sharding. The remaining task is that ranks which read the same samples
draw the same random numbers (:mod:`smp_strategy.engine.data_readers`).

[Note: one stream] Between two batches a script may draw random numbers of its own: noise for inputs, on one rank a
sample to show. In a single process those draws and the data path share one stream. So the ranks of a replica adopt the
generator states of its first rank before each batch, at the price of one small message. Replica 0 then draws what a
single process draws, whatever the script does with the generators.

The start of a pass is intercepted where Accelerate itself registers it: some functions derive a loader from a prepared
one (``skip_first_batches``) without any Accelerator.

With ``dispatch_batches`` only the main process reads and sends, and each rank slices out the part of its replica.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    SeedableRandomSampler,
    get_sampler,
)
from accelerate.state import GradientState
from torch.utils.data import BatchSampler, DataLoader

from smp_strategy.engine.data_readers import BatchSource, DataReaders
from smp_strategy.engine.saving.resumable_loader import follow, generators_of, pass_of
from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.accelerate.session import HookBase, Session

__all__ = ["ActiveLoader", "LoaderHooks", "shard_of"]

_ADVICE = (
    "A dataset or sampler that picks its samples by rank must go by `accelerator.process_index` and "
    "`accelerator.num_processes` instead of the rank and the world size"
)


class LoaderHooks(HookBase):
    """Methods of the Accelerator for data loaders."""

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a loader of this replica's share of the batches, identical on all its ranks. Collective.

        Raises:
            UnsupportedError: ``dispatch_batches`` with a stateful loader, whose state counts batches by process.
        """
        # All instances of this class are one. Each loader calls this when a pass begins.
        self.gradient_state._add_dataloader = _PassStart(self.smp)
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if isinstance(prepared, DataLoaderDispatcher):
            if prepared.use_stateful_dataloader and self.num_processes != self.state.num_processes:
                raise UnsupportedError(
                    "`use_stateful_dataloader=True` with batches that the main process dispatches counts batches by "
                    f"process ({self.state.num_processes}), of which {self.num_processes} read samples of their own. "
                    "Set `dispatch_batches=False` in the DataLoaderConfiguration."
                )
            _deal_out(prepared, self.smp, _ReplicaStream(self.smp))
        sampler = get_sampler(prepared)
        if isinstance(sampler, SeedableRandomSampler):  # each rank has drawn a seed for itself
            seed = sampler.initial_seed
            sampler.initial_seed = self.smp.main_calls.decided(lambda: seed, "the seed of a sampler")
        _seed_workers_by(self.process_index, prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader for the rest of a pass, without its first batches."""
        rest = super().skip_first_batches(dataloader, num_batches)
        if isinstance(rest, DataLoaderDispatcher):
            rest.slice_fn = dataloader.slice_fn
            _deal_out(rest, self.smp, _ReplicaStream(self.smp))
        return rest


@final
class ActiveLoader:
    """The prepared loader that the script is iterating over, of which Accelerate's gradient ``state`` keeps track."""

    def __init__(self, session: Session, state: GradientState) -> None:
        self._session = session
        self._state = state

    def check_even(self, training: bool) -> None:
        """Refuse a step of replicas that wait for each other, some of which have one batch more."""
        loader, session = self._state.active_dataloader, self._session
        need_each_other = training or session.shape.dp_shard > 1 or not session.config.prescaled_batch
        if need_each_other and loader is not None and _is_uneven(shard_of(loader)):
            raise UnsupportedError(
                f"With `even_batches=False` some of the {session.num_data_ranks} replicas get one batch more than "
                f"others ({len(loader.dataset)} samples), which then do not take part in its step: the run would wait "
                "for ever. Use `even_batches=True` (samples from the start fill up the last batches), or "
                "`drop_last=True` in the DataLoader."
            )

    def num_batches(self) -> int | None:
        """Length of the loader; ``None`` if there is none, or it does not know."""
        try:
            return None if self._state.active_dataloader is None else len(self._state.active_dataloader)
        except TypeError:  # an iterable dataset
            return None

    def last_read(self) -> BatchSource | None:
        """Origin of the batch that the script received last; ``None`` if unknown."""
        loader = self._state.active_dataloader
        found = pass_of(getattr(loader, "base_dataloader", None))
        # Accelerate reads one batch ahead. With a dispatcher that is the batch of all.
        return None if found is None or isinstance(loader, DataLoaderDispatcher) else found.read_before


@final
class _ReplicaStream(DataReaders):
    """Random number stream of a replica. See [Note: one stream]."""

    def __init__(self, session: Session) -> None:
        ranks = session.data_ranks()[session.data_rank]
        shares = session.config.share_batches
        super().__init__(ranks, session.rank, lambda: session.data_groups.reading_group, advice=_ADVICE, shares=shares)
        self._device, self._pass_by = session.device, session.main_calls.pass_by

    def begin(self, *generators: torch.Generator) -> None:
        """Start a pass. Collective."""
        self._pass_by()
        super().begin(*generators)

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Context for all draws on the way to a batch. Collective."""
        self.follow_first()
        yield

    def follow_first(self) -> None:
        """Adopt the global generator states of the first rank. Collective."""
        self._pass_by()
        self.take_over(device=self._device)

    # Ranks compare the first batches, and the ends of short passes.
    arrived = DataReaders.agreed
    ended = DataReaders.agree_on_end


@final
class _PassStart:
    """Callback for the start of a pass over a loader. A pickled copy (it is part of a pickled state) has no session."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        self._stream = None if session is None else _ReplicaStream(session)

    def __reduce__(self) -> Any:
        return _PassStart, ()

    def __call__(self, loader: Any) -> None:
        """Make ``loader`` produce the same batches on all ranks of the replica. Collective."""
        if self._session is not None and isinstance(loader, DataLoaderAdapter):
            assert self._stream is not None
            if isinstance(loader, DataLoaderDispatcher):
                _deal_out(loader, self._session, self._stream)
                self._stream.begin(*generators_of(loader.base_dataloader))
            else:
                follow(loader.base_dataloader, self._stream)
        GradientState._add_dataloader(GradientState(), loader)


@final
class _ReplicaPart:
    """Slice function of a dispatcher: cuts this replica's part out of a batch. All ranks call it with one batch."""

    def __init__(self, cut: Callable[..., Any], session: Session, stream: _ReplicaStream) -> None:
        self._cut = cut
        self._session = session
        self._stream = stream

    def __call__(self, data: Any, of_rank: slice, **_place: int) -> Any:
        # The main process has drawn for the next batch already, as a single process would have.
        self._stream.follow_first()
        size, number = of_rank.stop - of_rank.start, self._session.data_rank
        # The slice begins at 0 for rank 0, which is data rank 0, and for the samples that later pad the last batch.
        part = slice(number * size, (number + 1) * size) if of_rank.start > 0 else of_rank
        return self._cut(data, part, process_index=number, num_processes=self._session.num_data_ranks)


def _deal_out(dispatcher: DataLoaderDispatcher, session: Session, stream: _ReplicaStream) -> None:
    # The main process reads one batch for each replica.
    counts = {"process_index": session.rank, "num_processes": session.num_data_ranks}
    dispatcher.state = SimpleNamespace(**counts, device=session.device)
    if not isinstance(dispatcher.slice_fn, _ReplicaPart):
        dispatcher.slice_fn = _ReplicaPart(dispatcher.slice_fn, session, stream)


def _seed_workers_by(data_rank: int, prepared: Any) -> None:
    """Seed data workers by data rank. The Trainer seeds them by global rank, so stages would augment differently."""
    seed = prepared.worker_init_fn
    if isinstance(seed, partial) and seed.func.__module__ == "transformers.trainer_utils" and "rank" in seed.keywords:
        prepared.base_dataloader.worker_init_fn = partial(seed, rank=data_rank)


def shard_of(loader: Any) -> Any:
    """Batch sampler that shards a prepared loader over replicas; ``None`` if it is not sharded by batch."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while batches is not None and not isinstance(batches, BatchSamplerShard):
        batches = getattr(batches, "batch_sampler", None)
    return batches


def _is_uneven(shard: Any) -> bool:
    """Whether some replicas get a batch more than others."""
    if shard is None or shard.even_batches or shard.drop_last or shard.num_processes == 1:
        return False
    if not shard.split_batches:
        return len(shard.batch_sampler) % shard.num_processes > 0
    left = len(shard.batch_sampler.sampler) % shard.batch_size
    return 0 < left <= shard.batch_size // shard.num_processes * (shard.num_processes - 1)
