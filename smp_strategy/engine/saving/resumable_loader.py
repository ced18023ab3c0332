"""Resumable iteration over data loaders, with random draws synchronised across ranks.

A :class:`~smp_strategy.engine.data_readers.DataReaders` controls the draws. To resume in the middle of a pass, a run
needs the remaining batches in the order of that pass, with the random numbers that would have been drawn for them. Data
loaders do not know their position. So a pass records the states of all generators at its beginning, and counts batches
[1]. A resumed pass begins with these generators, so its sampler gives the same order, and is brought to the position in
one of three ways.

2. The loader has a ``state_dict`` (torchdata's StatefulDataLoader), which is loaded.
3. Samples are read one by one in this process: indices are skipped without reading samples. Only the draws of the
   sampler are repeated then. That leads to the same numbers only if the sampler draws all of them for the first batch,
   as torch's do, or if nothing but the sampler draws, which is checked.
4. Otherwise batches are read and dropped: workers have their own generators, and an iterable dataset may do anything.

Generators are then set to their states after the last batch. Batches that were fetched but not used yet (Lightning
prefetches one from a loader without a length) are read again with the random numbers of their first reading [5].
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, final, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from smp_strategy.distributed.deadlock import watch_of
from smp_strategy.distributed.rng_state import RngState, global_state, set_global_state
from smp_strategy.engine.data_readers import BatchSource, DataReaders
from smp_strategy.engine.saving.rank_generators import packed, unpacked
from smp_strategy.errors import CheckpointError
from smp_strategy.model.patching import subclass_of
from smp_strategy.model.trace.pytree import Path, items_of, nodes

__all__ = ["LoaderPass", "batch_size_of", "follow", "generator_states", "generators_of", "pass_of", "set_generators"]

_END = object()
# Limit of recorded positions at which others have drawn from the stream of a pass.
_MAX_JUMPS: Final = 64


def follow(loader: DataLoader[Any], reading: DataReaders) -> None:
    """Let ``loader`` draw as ``reading`` says, from the next pass on."""
    if not isinstance(loader, _FollowingLoader):
        loader.__class__ = _following(type(loader))
    loader.smp_reading = reading


def pass_of(loader: Any) -> "LoaderPass | None":
    """Latest pass over ``loader``, if the loader follows a reading and the pass is still in use."""
    if not isinstance(loader, _FollowingLoader) or loader.smp_pass is None:
        return None
    return loader.smp_pass()


def _following(stock: type[DataLoader[Any]]) -> Any:
    # Accelerate says that its loaders are of the class of what they are around, and pickles them by that name.
    return subclass_of(stock, _FollowingLoader, smp_stock=stock, __class__=property(lambda _: stock))


def _empty(stock: type[DataLoader[Any]]) -> DataLoader[Any]:
    following = _following(stock)
    loader: DataLoader[Any] = following.__new__(following)
    return loader


class _FollowingLoader(DataLoader[Any]):
    smp_reading: DataReaders
    smp_stock: type[DataLoader[Any]]
    smp_pass: "weakref.ref[LoaderPass] | None" = None  # the iterating code keeps it, and workers with it

    def __reduce_ex__(self, protocol: Any) -> Any:
        kept = {name: value for name, value in vars(self).items() if name != "smp_pass"}
        return _empty, (self.smp_stock,), kept  # no module has the class

    def __iter__(self) -> Any:
        found = LoaderPass(self, self.smp_iterate)
        self.smp_pass = weakref.ref(found)
        return found

    def smp_iterate(self) -> Iterator[Any]:
        """Begin an ordinary pass, whose batches carry their number of samples."""
        collate, puts_together = self.collate_fn, self.batch_size is not None or self.batch_sampler is not None
        if not puts_together:
            return super().__iter__()
        self.collate_fn = _Counting(collate, is_of_numbers=_asks_for_numbers(self))
        try:
            return super().__iter__()
        finally:
            self.collate_fn = collate


class _CountedBatch(NamedTuple):
    batch: Any
    read: BatchSource


@final
class _Counting:
    """Collate function that also records the number of samples; it is sent to workers."""

    def __init__(self, collate: Callable[[Any], Any], *, is_of_numbers: bool) -> None:
        self._collate = collate
        self._is_of_numbers = is_of_numbers

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if not isinstance(samples, (list, tuple)):
            return batch
        lists = frozenset(_taken_over(batch, samples))
        return _CountedBatch(batch, BatchSource(len(samples), lists, is_of_numbers=self._is_of_numbers))


def _asks_for_numbers(loader: DataLoader[Any]) -> bool:
    """Whether all ranks of a replica ask for the same samples, and not each for those of its global rank."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    is_by_rank = any(isinstance(each, DistributedSampler) and each.num_replicas == world_size for each in samplers)
    return not is_by_rank and not isinstance(loader.dataset, IterableDataset)


def _taken_over(tree: Any, samples: Sequence[Any]) -> Iterator[Path]:
    """Yield paths of lists with one tensor per sample that sizes alone cannot tell from lists of views.

    The lengths of such a list and of its tensors both equal the number of samples. Tensors that the collate function
    took over from the samples are samples; views of all samples are made by the collate function.
    """
    number = len(samples)

    def is_list(node: Any) -> bool:
        return isinstance(node, list) or type(node) is tuple

    def is_row(item: Any) -> bool:
        return isinstance(item, Tensor) and item.shape[:1] == (number,)

    def is_unclear(node: Any) -> bool:
        return is_list(node) and len(node) == number and all(map(is_row, node))

    def opened(node: Any) -> Iterable[tuple[Any, Any]]:
        if is_unclear(node) or (is_list(node) and all(isinstance(item, (str, int, float)) for item in node)):
            return ()
        return items_of(node) if is_list(node) or isinstance(node, Mapping) else ()

    for path, node in nodes(tree, opened):
        if is_unclear(node):
            pairs = zip(node, samples, strict=True)
            if all(any(leaf is item for leaf in tree_leaves(sample)) for item, sample in pairs):
                yield path


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@final
class LoaderPass:
    """Iterator over the batches of one pass over a loader, with a position that can be saved and restored."""

    def __init__(self, loader: _FollowingLoader, iterate: Callable[[], Iterator[Any]]) -> None:
        self._loader = loader
        self._iterate = iterate
        self._reading = loader.smp_reading
        self._generators = generators_of(loader)
        self._is_new = True
        self._place: Mapping[str, Any] | None = None  # position to resume from at the next batch
        self._ready: deque[Any] = deque()
        self._latest: tuple[BatchSource | None, ...] = ()  # origins of the last two batches
        self._begin()

    def _begin(self) -> None:
        self._reading.begin(*self._generators)
        self._began = self._before = self._reading.state(), generator_states(self._loader)  # [1]
        self._state_before: dict[str, Any] | None = None
        self._num_given = 0
        self._jumps: list[tuple[int, RngState]] = []
        self._has_all_jumps = True
        self._is_over = False
        with self._reading.draws():
            self._inner = self._iterate()
        self._left: RngState | None = self._reading.state()

    def __iter__(self) -> "LoaderPass":
        return self

    def __next__(self) -> Any:
        if self._place is not None:
            place, self._place = self._place, None
            if place:
                self._go_on(place)
            else:
                self._begin()
        if self._ready:
            return self._given(self._ready.popleft())
        if self._is_new:
            # Lightning does not ask for more batches than there are, so ranks that have fewer would stop asking.
            self._is_new = False
            self._reading.compare("an unknown number" if self._length() is None else self._length())
        self._note()
        with self._reading.draws():
            found = next(self._inner, _END)
        self._left = self._reading.state()
        self._reading.compare("none left" if found is _END else "one more")
        if found is _END:
            self._reading.ended()
            self._is_over = True
            self._tell()
            raise StopIteration
        self._num_given += 1
        self._tell()
        return self._given(found)

    def _tell(self) -> None:
        """Let errors about ranks that wait for each other say where this rank is in its data."""
        if dist.is_initialized():
            watch_of().read = self._num_given, self._is_over

    def _given(self, found: Any) -> Any:
        """Record the number of samples of a batch, and return the batch."""
        batch, read = found if isinstance(found, _CountedBatch) else (found, None)
        batch, read = self._reading.arrived(batch, read)
        self._latest = (*self._latest[-1:], read)
        return batch

    @property
    def read_before(self) -> BatchSource | None:
        """Origin of the second to last batch, for callers that read one batch ahead; at the end, of the last batch."""
        return self._latest[-1 if self._is_over else 0] if self._latest else None

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def _length(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # an iterable dataset does not know
            return None

    # Saving and resuming

    def _note(self) -> None:
        """Record the generator states before the next batch, and whether others have drawn from the stream."""
        self._before = self._reading.state(), generator_states(self._loader)
        if self._before[0] != self._left:
            if len(self._jumps) < _MAX_JUMPS:
                self._jumps.append((self._num_given, self._before[0]))
            else:
                self._has_all_jumps = False
        if isinstance(self._loader, _Stateful) and self._length() is None:
            self._state_before = self._loader.state_dict()

    def place(self, num_unused: int = 0) -> dict[str, Any]:
        """Position of this pass, for a checkpoint; ``num_unused`` batches were fetched, but not used."""
        if self._place is not None:
            return dict(self._place)  # no batch was requested since
        num_unused = 0 if self._is_over else num_unused
        found: dict[str, Any] = {
            "began": packed(self._began[0]),
            "generators_began": self._began[1],
            "generators": generator_states(self._loader),
            "num_given": self._num_given,
            "batch_size": batch_size_of(self._loader),
            "num_unused": num_unused,
            "others_drew": self._reading.state() != self._left,
            "jumps": [[number, packed(state)] for number, state in self._jumps],
            "has_all_jumps": self._has_all_jumps,
        }
        if num_unused:
            found |= {"before": packed(self._before[0]), "generators_before": self._before[1]}
        if isinstance(self._loader, _Stateful):
            found["loader"] = self._state_before if num_unused else self._loader.state_dict()
        return found

    def begin_again(self) -> None:
        """Restart when the next batch is requested, with the generators of that time."""
        self.go_on({})

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Resume from ``place`` when the next batch is requested; the global generators are set by then."""
        self._place = place
        if self._loader.num_workers:
            self._inner, self._loader._iterator = _LengthOnly(self._loader), None  # ends workers
        self._ready.clear()

    def _go_on(self, place: Mapping[str, Any]) -> None:
        self._reading.go_on()
        self._began = unpacked(place["began"]), place["generators_began"]
        self._num_given = place["num_given"]
        self._jumps = [(number, unpacked(state)) for number, state in place["jumps"]]
        self._has_all_jumps = place["has_all_jumps"]
        self._is_over = False
        num_used = place["num_given"] - place["num_unused"]
        there = unpacked(place["before"]) if place["num_unused"] else self._reading.state()
        with self._reading.elsewhere(self._began[0]):
            if "loader" in place and isinstance(self._loader, _Stateful):
                self._loader.load_state_dict(place["loader"])  # [2]
                self._restart()
            elif not self._pass_over(num_used, place, there):  # [3]
                self._read(num_used)  # [4]
        if place["num_unused"]:
            with self._reading.elsewhere(unpacked(place["before"])):  # [5]
                set_generators(self._loader, place["generators_before"])
                self._ready.extend(self._existing(lambda: next(self._inner)) for _ in range(place["num_unused"]))
        if not place.get("is_of_others"):
            set_generators(self._loader, place["generators"])
        self._left = None if place["others_drew"] else self._reading.state()

    def _restart(self) -> None:
        set_global_state(self._began[0])
        set_generators(self._loader, self._began[1])
        self._inner = self._iterate()

    def _pass_over(self, number: int, place: Mapping[str, Any], state: RngState) -> bool:
        """Skip the indices of the first batches; ``False``: that does not lead to the same random numbers."""
        if self._loader.num_workers or isinstance(self._loader.dataset, IterableDataset):
            return False
        self._restart()
        jumps = dict(self._jumps)
        here = _flat(global_state(), generator_states(self._loader))
        has_drawn = [False] * len(here)
        for done in range(number):
            if done in jumps:
                set_global_state(jumps[done])
                here = _flat(jumps[done], generator_states(self._loader))
            self._existing(self._inner._next_index)  # type: ignore[attr-defined]
            before, here = here, _flat(global_state(), generator_states(self._loader))
            if done:
                has_drawn = [each or one != other for each, one, other in zip(has_drawn, before, here, strict=True)]
        if place.get("is_of_others"):  # there are no numbers to compare with
            return True
        there = _flat(state, place["generators_before" if place["num_unused"] else "generators"])
        if len(there) != len(here):
            return True
        return all(one == other or not drawn for drawn, one, other in zip(has_drawn, here, there, strict=True))

    def _read(self, number: int) -> None:
        """Read the first batches, and drop them."""
        self._restart()
        began = global_state()
        jumps = dict(self._jumps)
        for done in range(number):
            if done in jumps:
                began = jumps[done] if global_state() == began else began
                set_global_state(jumps[done])
            self._existing(lambda: next(self._inner))
        if not self._has_all_jumps and global_state() != began:
            warnings.warn(
                "Others have drawn random numbers between batches (`on_after_batch_transfer`, say), which cannot be "
                "repeated for an iterable dataset: after this batch it may not draw what it would have drawn. Use a "
                "StatefulDataLoader of torchdata, or a generator of its own in the dataset.",
                stacklevel=2,
            )

    def _existing(self, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except StopIteration:
            raise CheckpointError(
                f"The checkpoint was written after {self._num_given} batches of an epoch, but the data loader has "
                "fewer now. Use the same data and batch size, or a checkpoint from the end of an epoch."
            ) from None


class _LengthOnly:
    """Placeholder for a pass of which only the length is still needed."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> "_LengthOnly":
        return self

    def __next__(self) -> Any:
        raise AssertionError("a pass that was left has been asked for a batch")

    def __len__(self) -> int:
        return len(self._loader._index_sampler)


def _flat(state: RngState, generators: Iterable[Tensor]) -> list[Any]:
    return [*state, *(each.numpy().tobytes() for each in generators)]


def batch_size_of(loader: Any) -> int | None:
    """Number of samples in a batch of ``loader``; ``None`` if unknown."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def generator_states(loader: Any) -> list[Tensor]:
    """States of all generators of ``loader``; none if it is no DataLoader."""
    return [each.get_state() for each in generators_of(loader)] if isinstance(loader, DataLoader) else []


def set_generators(loader: Any, states: Sequence[Tensor]) -> None:
    """Set the generators of ``loader`` to :func:`generator_states`, unless it is a different one with other numbers."""
    generators = generators_of(loader) if isinstance(loader, DataLoader) else []
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Generators of the loader, its samplers and its dataset."""
    holders: list[Any] = [loader, loader.dataset, loader.sampler]
    batches = loader.batch_sampler
    while batches is not None:  # a sampler of a part of the batches wraps one of all
        holders += [batches, getattr(batches, "sampler", None)]
        batches = getattr(batches, "batch_sampler", None)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
