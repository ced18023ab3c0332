"""Writer of sharded checkpoints: each rank writes its share to a file of its own.

[Note: two halves of a save] In the first half, ranks check that they still hold what they held at the last save, copy
their shares to host memory, and training continues. The second half, which may run in any thread, writes the files and
tells the first rank the places of all items; the first rank adds the descriptions and commits the folder. If a rank
fails, the folder does not appear.

Collectives of ranks that write a checkpoint together; an error of one rank becomes an error of all.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import dcp_metadata, manifest
from smp_strategy.checkpoint.storage.async_save import StagingBuffers, in_host_memory, raw
from smp_strategy.checkpoint.storage.atomic_commit import BEFORE
from smp_strategy.checkpoint.storage.dcp_format import Envelopes, FlatState, check_object, object_item, write_item
from smp_strategy.checkpoint.storage.dcp_metadata import Chunk, DirectoryContents, ItemLocation
from smp_strategy.checkpoint.storage.manifest import DigestingFile, Manifest, Region, to_disk
from smp_strategy.checkpoint.storage.path_kind import check_replaceable
from smp_strategy.checkpoint.storage.remote_path import AnyPath, RemotePath
from smp_strategy.checkpoint.storage.write_plan import Assigned, Offer, WritePlan, assign
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import CheckpointError, cause_of
from smp_strategy.model.shard_layout import Rectangle

__all__ = ["REST", "Prepared", "ShardedWriter", "StorageRanks"]


T = TypeVar("T")


@final
class StorageRanks:
    """Group of ranks that call the same methods in the same order.

    Args:
        group: Process group of the backend gloo; ``None``: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def any_later(self, here: bool) -> Callable[[], bool]:
        """Begin an all-reduce of ``here``; the returned function waits for it and tells whether it is true on any
        rank."""
        if self._group is None:
            return lambda: here
        flag = torch.tensor(int(here))
        work = collectives.reduce_numbers(flag, dist.ReduceOp.MAX, group=self._group, doing="whether ranks can write")

        def answer() -> bool:
            work.wait()
            return bool(flag)

        return answer

    def from_all(self, value: T) -> list[T]:
        """All-gather of objects."""
        if self._group is None:
            return [value]
        return collectives.gather_objects(value, "what ranks write", self._group)

    def first_does(self, action: Callable[[], T], failure: str) -> T:
        """Call ``action`` on the first rank and broadcast its result, or a CheckpointError that begins with
        ``failure``."""
        result, error = _outcome(action, self.rank == 0)
        if self._group is None:
            message = self._message(error)
        else:
            both = result, self._message(error)
            result, message = collectives.tell(both, self._first, "what the first rank writes", self._group)
        if message:
            raise CheckpointError(f"{failure} {message}") from error
        return result

    def all_do(self, action: Callable[[], T], failure: str) -> list[T]:
        """Call ``action`` on all ranks and gather the results on the first; other ranks get their own.

        If a rank fails, all of them get a CheckpointError that begins with ``failure`` and names it.
        """
        result, error = _outcome(action, True)
        outcomes: list[Any] = [(result, self._message(error))]
        if self._group is not None:
            outcomes = collectives.collect(outcomes[0], self._first, "the end of writing", self._group)
        failed = self.first_does(lambda: [message for _, message in outcomes if message], failure)
        if failed:
            raise CheckpointError(f"{failure} {' '.join(failed)}") from error
        return [each for each, _ in outcomes] if self.rank == 0 else [result]

    def _message(self, error: BaseException | None) -> str:
        if error is None:
            return ""
        reason = str(error) if isinstance(error, CheckpointError) else cause_of(error)
        return f"Rank {self.rank}: {reason}" if self.size > 1 else reason


def _outcome(action: Callable[[], T], is_called: bool) -> tuple[Any, Exception | None]:
    if not is_called:
        return None, None
    try:
        return action(), None
    except Exception as error:
        return None, error


REST: Final = "meta.pt"


class _Written(NamedTuple):
    """Item in a rank's file."""

    part: Rectangle | None
    """Rectangle of a tensor; ``None`` for an object."""
    region: Region


@final
class ShardedWriter:
    """Writer for many saves of the same layout; keeps the plan and the staging buffers.

    Args:
        group: Makes the process group of the ranks that write together: of the backend gloo, used by nothing else, so
            that a thread may use it. ``None``: this process writes alone.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup] | None = None) -> None:
        self._group = group
        self._ranks: StorageRanks | None = None
        self._offer: Offer | None = None
        self._plan: WritePlan | None = None
        self._spare: StagingBuffers | None = None
        self._envelopes = Envelopes()

    def prepare(self, state: Mapping[str, Any], *, copy: bool = True) -> "Prepared":
        """Make the write plan, and copy this rank's share to host memory. Collective.

        Args:
            state: Nested dicts with :class:`~smp_strategy.checkpoint.storage.held_tensor.HeldTensor` or tensors, and
                other objects, which must be what ``torch.load(..., weights_only=True)`` loads. Keys are strings.
                Elements that several ranks hold are written once; of an object, the value of the first of them.
            copy: Whether the state may be changed before it is written.

        Raises:
            CheckpointError: on all ranks; there are elements that nobody has, or two things of one name.
        """
        if self._ranks is None:
            self._ranks = StorageRanks(None if self._group is None else self._group())
        flat, failure = FlatState({}, {}, {}, {}), ""
        try:
            flat = FlatState.of(state)
        except CheckpointError as error:
            failure = str(error)
        offer, plan = Offer.of(flat), self._plan
        # An error must not end this rank here: the others would wait for it in the comparison below.
        is_new = plan is None or bool(failure) or offer != self._offer
        is_new_anywhere = self._ranks.any_later(is_new)
        # Usually no rank's offer has changed: copies are made while the ranks agree on that.
        prepared = None if is_new or plan is None else self._take(flat, plan, copy)
        if is_new_anywhere():
            if prepared is not None:
                prepared.let_go()
            prepared = self._take(flat, self._planned(offer, failure), copy)
        assert prepared is not None
        return prepared

    def _planned(self, offer: Offer, failure: str) -> WritePlan:
        assert self._ranks is not None
        self._offer = self._plan = None
        found = self._ranks.from_all((offer, failure))
        if failures := [f"Rank {rank}: {failed}" for rank, (_, failed) in enumerate(found) if failed]:
            raise CheckpointError(" ".join(failures))
        self._plan, self._offer = assign([each for each, _ in found]), offer
        return self._plan

    def _take(self, flat: FlatState, plan: WritePlan, copy: bool) -> "Prepared":
        assert self._ranks is not None
        prepared = Prepared(self, self._ranks, plan)
        try:
            tensors = [_view(flat, item) for item in plan.shares[self._ranks.rank]]
            # Serialised now, since training may change them.
            names = plan.objects[self._ranks.rank]
            prepared.objects = {name: object_item(flat.objects[name]) for name in names}
            # Taken away while in use: `let_go` gives them back, after the files are written.
            if copy:
                copies, self._spare = self._spare, None
                if copies is None or not copies.fits(tensors):
                    copies = StagingBuffers(tensors)
                prepared.copies, tensors = copies, copies.take(tensors)
            prepared.tensors = tensors
        except Exception as error:  # raised in `write`: raised here, it would leave the other ranks waiting
            prepared.failure = error
        return prepared


def _view(flat: FlatState, item: Assigned) -> Tensor:
    """View of this rank's memory that is the rectangle to write."""
    held = flat.tensors[item.name]
    block, blocks = held.blocks[0], held.blocks
    if len(blocks) > 1:
        block = next(each for each in blocks if each.rectangle == item.block)
    assert block.tensor.dtype == held.dtype
    tensor = block.tensor.detach()
    return item.part.view_of(tensor, item.block)


@final
class Prepared:
    """State ready to be written; made by :meth:`ShardedWriter.prepare`."""

    def __init__(self, writer: ShardedWriter, ranks: StorageRanks, plan: WritePlan) -> None:
        self._writer, self._ranks, self._plan = writer, ranks, plan
        self.tensors: list[Tensor] = []
        """Tensors that this rank writes."""
        self.objects: dict[str, bytes] = {}
        """Objects that this rank writes, as DCP items."""
        self.copies: StagingBuffers | None = None
        """Staging buffers that have the tensors; ``None``: they are views of the model's memory."""
        self.failure: Exception | None = None
        """Error of this rank in the first half."""

    def let_go(self) -> None:
        """Return the staging buffers for the next save; this one cannot be written any more."""
        if self.copies is not None:
            self._writer._spare = self.copies
        self.tensors, self.copies = [], None

    def write(
        self,
        target: AnyPath,
        *,
        rest: Mapping[str, Any] | None = None,
        note: Mapping[str, Any] | None = None,
        check: commit.Check = check_replaceable,
    ) -> None:
        """Write the folder ``target``, which is complete and synced to disk when this returns. Collective.

        It may run in a thread, on every rank; the next :meth:`ShardedWriter.prepare` must wait for it.

        Args:
            target: Path of the folder, or its address; an existing one is replaced.
            rest: Other content of the checkpoint, for ``meta.pt``; of the first rank. Must not be changed meanwhile.
            note: Description of the checkpoint, as JSON has it; of the first rank.
            check: See :func:`~smp_strategy.checkpoint.storage.atomic_commit.begin`; of the first rank.

        Raises:
            CheckpointError: on all ranks, if one could not write. The previous folder is still there.
        """
        ranks, failure = self._ranks, f"{target} was not saved; {BEFORE}"

        def finish() -> None:
            self._describe(staging, written, rest or {}, note or {})
            commit.commit(staging, target, check=check)

        staging = ranks.first_does(lambda: commit.begin(target, is_folder=True, check=check), failure)
        try:
            written = ranks.all_do(lambda: self._write_share(staging), failure)
            ranks.first_does(finish, failure)
        finally:
            if ranks.rank == 0:
                commit.discard(staging)
            self.let_go()

    def _write_share(self, staging: AnyPath) -> list[_Written]:
        if self.failure is not None:
            raise self.failure
        share = self._plan.shares[self._ranks.rank]
        if not share and not self.objects:
            return []
        envelopes, written = self._writer._envelopes, []
        with _created(staging / _file_of(self._ranks.rank)) as raw_file:
            file = DigestingFile(raw_file)
            for item, tensor in zip(share, self.tensors, strict=True):
                values = in_host_memory(tensor)
                before, behind = envelopes.of(values)
                written.append(_Written(item.part, write_item(file, item.name, before, raw(values), behind)))
            for name, data in self.objects.items():
                check_object(name, data)
                written.append(_Written(None, write_item(file, name, data, b"", b"")))
        return written

    def _describe(
        self, staging: AnyPath, written: list[list[_Written]], rest: Mapping[str, Any], note: Mapping[str, Any]
    ) -> None:
        files: dict[str, tuple[Region, ...]] = {}
        for rank, items in enumerate(written):
            if items:
                files[_file_of(rank)] = regions = tuple(item.region for item in items)
                size = (staging / _file_of(rank)).stat().st_size
                if size != sum(region.length for region in regions):
                    raise CheckpointError(f"{_file_of(rank)} has {size} bytes only, as rank 0 sees it.")
        # The manifest comes last, with the digests of all other files.
        files[dcp_metadata.FILE_NAME] = _write_whole(
            staging / dcp_metadata.FILE_NAME, lambda file: file.write(dcp_metadata.to_bytes(self._contents(written)))
        )
        files[REST] = _write_whole(staging / REST, lambda file: torch.save(dict(rest), cast(io.BytesIO, file)))
        with _created(staging / manifest.FILE_NAME) as file:
            file.write(Manifest(note=note, files=files).to_bytes())

    def _contents(self, written: list[list[_Written]]) -> DirectoryContents:
        chunks: dict[str, list[Chunk]] = {name: [] for name in self._plan.tensors}
        objects: dict[str, ItemLocation] = {}
        for rank, items in enumerate(written):
            for part, region in items:
                location = ItemLocation(_file_of(rank), region.offset, region.length)
                if part is None:
                    objects[region.name] = location
                else:
                    chunks[region.name].append(Chunk(part, location))
        tensors = {name: (described, tuple(chunks[name])) for name, described in self._plan.tensors.items()}
        for name, aliases in self._plan.aliases.items():
            tensors.update(dict.fromkeys(aliases, tensors[name]))
        return DirectoryContents(tensors, objects, self._plan.paths, has_manifest=True)


def _write_whole(path: AnyPath, write: Callable[[DigestingFile], Any]) -> tuple[Region, ...]:
    with _created(path) as raw_file:
        file = DigestingFile(raw_file)
        write(file)
        digests = tuple(file.end_stretch())
    return (Region(name=path.name, offset=0, before=0, values=file.size, behind=0, digests=digests),)


@contextmanager
def _created(path: AnyPath) -> Iterator[BinaryIO]:
    """New file, which is complete and synced to disk when the context ends."""
    if isinstance(path, RemotePath):
        with path.open("wb") as file:
            yield file
        return
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb", buffering=0) as local:
        yield cast(BinaryIO, local)
        to_disk(cast(BinaryIO, local))


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"
