"""Whole tensors from a state that is spread over ranks, whatever they are for: memory, or files of any kind.

Ranks tell each other once which rectangles they have. So all know who sends what, and :meth:`SpreadState.collected`
brings one whole tensor to one rank, which takes what it has itself from where it is. Who asks for it is a *sink*::

    SpreadState.on_first, on_all_ranks    new memory of global rank 0, or of every rank
    torch_file.write_torch_file           its place in a file of ``torch.save``
    SpreadState.write                     its place in a file of safetensors

A library that saves models edits a state dict and splits it into files. Its tensors are deferred
(:mod:`smp_strategy.model.deferred_tensor`), so that a single rank can do this for the whole model. The resulting files
are dealt out to ranks. A writer gathers one tensor at a time, or those that a conversion needs together.

[Note: errors of writers] A writer that cannot write (its disk is full) goes on receiving, because others are sending to
it. All ranks compare notes after each round of about a GiB, and stop then.

A file of safetensors has one writer, a rank that has as much of it as any other. It is written in *portions*: the
tensors that are made of the same entries of the state dict, since these are gathered once for all of them. Portions of
different writers take turns, so that all writers are at work, and all ranks know the order, so that sends and receives
match.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, WholeObject
from smp_strategy.checkpoint.storage.weight_file import SafetensorsFile
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.balance import balanced_among
from smp_strategy.distributed.rendezvous import alike
from smp_strategy.model.deferred_tensor import DeferredTensor, Known, Recipe, entries_of, entry
from smp_strategy.model.shard_layout import Rectangle

__all__ = [
    "FirstError",
    "PlannedFile",
    "PlannedTensor",
    "SpreadState",
    "assign_writers",
    "each_in_turn",
    "in_rounds",
    "portions_in_turn",
]


T = TypeVar("T")
_PART: Final = "a part of a tensor that another rank writes"
_STATE: Final = "a state that rank 0 has collected"


class EntryOffer(NamedTuple):
    """One rank's share of one entry of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """``None``: the entry is no tensor."""
    aliases: tuple[str, ...]
    rectangles: tuple[Rectangle, ...]
    value: Any = None
    """Value of an entry that is no tensor."""

    @classmethod
    def of(cls, value: Any) -> "EntryOffer":
        """The offer of an entry that this rank has."""
        if not isinstance(value, HeldTensor):
            return cls((), None, (), (), value.value if isinstance(value, WholeObject) else value)
        return cls(value.shape, value.dtype, value.aliases, tuple(block.rectangle for block in value.blocks))


def _merged(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names in an order that agrees with each list where possible: a rank may have entries that others never
    see."""
    merged: list[str] = []
    known: set[str] = set()
    for names in map(list, lists):
        for before, name in zip([None, *names], names, strict=False):
            if name not in known:
                # Behind the name that precedes it here, so that a rank's own entries do not all come last.
                merged.insert(merged.index(before) + 1 if before is not None else 0, name)
                known.add(name)
    return merged


class PlannedTensor(NamedTuple):
    """Tensor of a file."""

    info: LocalTensorInfo
    recipe: Recipe

    @classmethod
    def of(cls, tensor: DeferredTensor) -> "PlannedTensor":
        """The tensor that ``tensor`` describes."""
        return cls(LocalTensorInfo(tuple(tensor.shape), tensor.dtype), tensor.recipe)


class PlannedFile(NamedTuple):
    """Safetensors file that is to be written."""

    name: str
    """Path within the folder."""
    tensors: Mapping[str, PlannedTensor]
    metadata: Mapping[str, str] | None


class Portion(NamedTuple):
    """Tensors of one file that are made of the same entries."""

    file: int
    names: tuple[str, ...]
    entries: tuple[str, ...]
    """Entries of the state dict to gather on the writer, in order."""


def assign_writers(held: Sequence[Sequence[int]], writers: Sequence[int]) -> list[int]:
    """Writer of each file: one that has as many bytes of it as any, so that the bytes of all files are balanced."""
    most = [max(amounts[rank] for rank in writers) for amounts in held]
    choices = [[rank for rank in writers if amounts[rank] == best] for amounts, best in zip(held, most, strict=True)]
    num_ranks = max(writers) + 1
    return balanced_among([sum(amounts) for amounts in held], choices, num_ranks)


def _portions(number: int, file: PlannedFile) -> list[Portion]:
    """Portions of a file, in the order of their first tensors."""
    members: dict[frozenset[str], list[str]] = {}
    for name, tensor in file.tensors.items():
        members.setdefault(entries_of(tensor.recipe), []).append(name)
    return [Portion(number, tuple(names), tuple(sorted(entries))) for entries, names in members.items()]


def portions_in_turn(files: Sequence[PlannedFile], writers: Sequence[int]) -> list[Portion]:
    """All portions: each writer's in the order of its files, and those of different writers in turn."""
    queues: dict[int, list[Portion]] = {}
    for number, (file, writer) in enumerate(zip(files, writers, strict=True)):
        queues.setdefault(writer, []).extend(_portions(number, file))
    waiting = list(map(iter, queues.values()))
    found: list[Portion] = []
    while waiting:
        turn = [(queue, next(queue, None)) for queue in waiting]
        found += [portion for _, portion in turn if portion is not None]
        waiting = [queue for queue, portion in turn if portion is not None]
    return found


def in_rounds(parts: Sequence[T], sizes: Sequence[int], most: int = 1 << 30) -> Iterator[Sequence[T]]:
    """Cut ``parts`` into rounds of ``most`` bytes, and of one part at least."""
    begin, total = 0, 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > most:
            yield parts[begin:number]
            begin, total = number, 0
        total += size
    if begin < len(parts):
        yield parts[begin:]


@final
class FirstError:
    """The first error of a rank that writes; see [Note: errors of writers]."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def attempt(self, action: Callable[[], object]) -> None:
        """Do ``action``, unless an earlier one has failed."""
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def complain(self) -> None:
        """Raise the error, if there was one."""
        if self._error is not None:
            raise self._error


def each_in_turn(
    parts: Sequence[T], sizes: Sequence[int], write: Callable[[T], None], errors: FirstError, doing: str
) -> None:
    """Call ``write`` for each part, in which ranks send and receive; all stop after a round with an error. Collective.

    Args:
        parts: All parts, the same on all ranks.
        sizes: Bytes of each.
        write: Gathers a part, and writes it on one rank, which keeps what goes wrong in ``errors``.
        errors: That of this rank.
        doing: What this is, for messages.

    Raises:
        PeerFailedError: another rank could not write.
    """
    # One round at least: an error may have come before the first part.
    for parts_of_round in [*in_rounds(parts, sizes)] or [()]:
        with alike(doing):
            for part in parts_of_round:
                write(part)
            errors.complain()


@final
class SpreadState:
    """State dict of which each rank has a share. Construction is collective over all ranks.

    Args:
        state: Entries of this rank by their names; a :class:`~smp_strategy.checkpoint.storage.held_tensor.HeldTensor`
            for each tensor. Its memory must stay as it is until files are written.
        names: Names of the module's own state dict, in order.
    """

    def __init__(self, state: Mapping[str, Any], names: Iterable[str]) -> None:
        self._state = state
        mine = {name: EntryOffer.of(value) for name, value in state.items()}
        self._offers = collectives.gather_objects(mine, "the collection of a state")
        # Reversed, so that the lowest rank with an entry wins: values that are no tensors may differ between ranks.
        first = {name: offer for offers in reversed(self._offers) for name, offer in offers.items()}
        self._first: dict[str, EntryOffer] = first
        # Tied tensors have several names and are gathered once, under the first one.
        self._home = {alias: name for name, offer in first.items() for alias in (name, *offer.aliases)}
        in_order = _merged([names, *self._offers])
        self._names = [name for name in in_order if name in self._home]
        self._names += [name for name in self._home if name not in in_order]

    def deferred(self, prefix: str = "") -> "OrderedDict[str, Any]":
        """The whole state dict, with deferred tensors. Tied tensors are one.

        Args:
            prefix: Selects the entries whose names begin with it, and is removed from these.
        """
        made = {home: entry(home, info.shape, info.dtype) for home, info in self.tensors().items()}
        return self.entries(made, prefix)

    def tensors(self) -> dict[str, LocalTensorInfo]:
        """Shape and dtype of each tensor by its first name."""
        infos = {home: self._info(home) for home in self._first}
        return {home: info for home, info in infos.items() if info is not None}

    def entries(self, tensors: Mapping[str, Any], prefix: str = "") -> "OrderedDict[str, Any]":
        """The whole state dict, with ``tensors`` by their first names.

        Args:
            tensors: Something for each of :meth:`tensors`.
            prefix: Selects the entries whose names begin with it, and is removed from these.
        """
        return OrderedDict(
            (name.removeprefix(prefix), tensors.get(self._home[name], self._first[self._home[name]].value))
            for name in self._names
            if name.startswith(prefix)
        )

    def _info(self, home: str) -> LocalTensorInfo | None:
        offer = self._first[home]
        return None if offer.dtype is None else LocalTensorInfo(tuple(offer.shape), offer.dtype)

    def on_first(self) -> "OrderedDict[str, Any]":
        """The whole state dict on global rank 0, with new tensors on the host; an empty one elsewhere. Collective."""
        # Not in the order of `self._names`, to which each rank contributes names of its own module.
        found = {name: self.collected(name, 0, is_new=True) for name in self.tensors()}
        return self.entries(found) if dist.get_rank() == 0 else OrderedDict()

    def on_all_ranks(self) -> "OrderedDict[str, Any]":
        """The whole state dict on every rank, with new tensors on the host. Collective."""
        first = self.on_first()
        found = {
            name: first[name] if first else torch.empty(info.shape, dtype=info.dtype, device="cpu")
            for name, info in self.tensors().items()
        }
        for tensor in found.values():
            collectives.broadcast(tensor, 0, group=None, doing=_STATE).wait()
        return self.entries(found)

    def write(self, files: Sequence[PlannedFile], folder: Path, *, writers: Sequence[int]) -> None:
        """Write ``files`` to ``folder``. Collective over all ranks.

        Args:
            files: Files, the same on all ranks, with recipes of their tensors.
            folder: Existing folder, in which there are no such files.
            writers: Ranks that see the folder.

        Raises:
            PeerFailedError: another rank could not write.
        """
        writer_of = assign_writers([self._held(file) for file in files], writers)
        portions = portions_in_turn(files, writer_of)
        sizes = [sum(self.num_bytes(name) for name in portion.entries) for portion in portions]
        rank = dist.get_rank()
        errors = FirstError()
        pen = _Pen(folder, {number: file for number, file in enumerate(files) if writer_of[number] == rank})
        errors.attempt(pen.write_empty)

        def write(portion: Portion) -> None:
            found = {name: self.collected(name, writer_of[portion.file]) for name in portion.entries}
            values = {name: value for name, value in found.items() if value is not None}
            if writer_of[portion.file] == rank:
                errors.attempt(lambda: pen.write(portion, values))

        try:
            each_in_turn(portions, sizes, write, errors, f"writing to {folder}")
        finally:
            pen.close()

    def num_bytes(self, name: str) -> int:
        """Bytes of the whole entry; 0 if it is no tensor."""
        info = self._info(name)
        return 0 if info is None else math.prod(info.shape) * info.dtype.itemsize

    def _held(self, file: PlannedFile) -> list[int]:
        """Bytes that each rank has of a file."""
        entries = {name for tensor in file.tensors.values() for name in entries_of(tensor.recipe)}
        return [
            sum(
                rectangle.numel * offer.dtype.itemsize
                for name, offer in offers.items()
                if name in entries and offer.dtype is not None
                for rectangle in offer.rectangles
            )
            for offers in self._offers
        ]

    def collected(self, name: str, writer: int, *, is_new: bool = False) -> Tensor | None:
        """The whole tensor ``name`` on rank ``writer``, ``None`` elsewhere. Collective over the ranks that have it.

        Values go straight to their place in the result.

        Args:
            name: First name of the tensor.
            writer: Rank that gets it.
            is_new: Whether it is in new memory on the host, also if the writer has all of it.
        """
        info, is_here = self._info(name), dist.get_rank() == writer
        assert info is not None
        sources, doing = self._sources(name, writer), "a part of a state" if is_new else _PART
        whole = Rectangle((0,) * len(info.shape), info.shape)
        if not is_new and list(sources) == [whole] and sources[whole][0] == writer:
            return self._block(name, sources[whole][1]) if is_here else None
        result = torch.empty(info.shape, dtype=info.dtype, device="cpu") if is_here else None
        # All ranks go through the rectangles in one order, so the messages of two ranks match by their order.
        for rectangle, (source, number) in sources.items():
            if result is None:
                if source == dist.get_rank():
                    collectives.send(self._block(name, number).cpu().contiguous(), writer, doing)
            elif source == writer:
                rectangle.view_of(result).copy_(self._block(name, number))
            else:
                _receive(rectangle.view_of(result), source, doing)
        return result

    def _sources(self, name: str, writer: int) -> dict[Rectangle, tuple[int, int]]:
        """Rank that provides each rectangle, and its number there: the writer, or else the first that has it."""
        sources: dict[Rectangle, tuple[int, int]] = {}
        for rank in (writer, *(other for other in range(len(self._offers)) if other != writer)):
            offer = self._offers[rank].get(name)
            for number, rectangle in enumerate(() if offer is None else offer.rectangles):
                # Empty rectangles are not sent. An empty tensor has no others, and must come from somewhere.
                if rectangle.numel or not self.num_bytes(name):
                    sources.setdefault(rectangle, (rank, number))
        return sources

    def _block(self, name: str, number: int) -> Tensor:
        held = self._state[name]
        assert isinstance(held, HeldTensor)
        return held.blocks[number].tensor.detach()


def _receive(place: Tensor, source: int, doing: str) -> None:
    if place.is_contiguous():
        collectives.receive(place, source, doing)
        return
    received = torch.empty(place.shape, dtype=place.dtype, device="cpu")
    collectives.receive(received, source, doing)
    place.copy_(received)


class _Pen:
    """Safetensors files that this rank writes."""

    def __init__(self, folder: Path, files: Mapping[int, PlannedFile]) -> None:
        self._folder = folder
        self._files = files
        self._left = {number: len(file.tensors) for number, file in files.items()}
        self._open: dict[int, SafetensorsFile] = {}

    def write_empty(self) -> None:
        """Write the files that have no tensors."""
        for number, file in self._files.items():
            if not file.tensors:
                self._begin(number).close()

    def write(self, portion: Portion, values: Mapping[str, Tensor]) -> None:
        """Write the tensors of ``portion``, which are made of ``values``."""
        if portion.file not in self._open:
            self._open[portion.file] = self._begin(portion.file)
        file, tensors = self._open[portion.file], self._files[portion.file].tensors
        known: Known = {name: value.cpu() for name, value in values.items()}
        for name in portion.names:
            with torch.no_grad():
                value = tensors[name].recipe.value(known)
            file.write(name, value)
        self._left[portion.file] -= len(portion.names)
        if not self._left[portion.file]:
            self._open.pop(portion.file).close()

    def close(self) -> None:
        """Close files that are incomplete, because of an error that is raised already."""
        for file in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
        self._open.clear()

    def _begin(self, number: int) -> SafetensorsFile:
        file = self._files[number]
        infos = {name: tensor.info for name, tensor in file.tensors.items()}
        return SafetensorsFile(self._folder / file.name, infos, file.metadata)
