"""Ledger of what ranks must agree on: notes of each rank, compared by one digest in one small message.

Replicas, stages and parts of layers only fit together if all ranks were given the same settings, built the same model,
ran the same program, and updated it alike. Whoever knows such a value notes it under a *topic*. The next comparison
sends one digest of all notes since the last one, whatever their number and size. Only if the digests differ are the
notes themselves exchanged; then all ranks raise the error of the first topic whose values differ.

A comparison that begins in the background (:meth:`Ledger.begin`) costs no round trip: its result is looked at when the
next one begins, or before values leave the ranks.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import SMPError

__all__ = ["Ledger", "Topic"]


class Topic(NamedTuple):
    """Something that all ranks must have alike. A constant of a module, since ranks send it to each other."""

    name: str
    """Name for readers of the code."""
    explain: Callable[[Mapping[int, Any]], SMPError]
    """Makes the error, given the values by global rank; an empty tuple for a rank that has noted nothing."""


class _Comparison(NamedTuple):
    """Comparison that has begun."""

    notes: Sequence[tuple[Topic, Any]]
    doing: str
    group: dist.ProcessGroup | None
    handle: Handle[object]
    differs: Callable[[], bool]
    """Returns whether digests differ; valid once the handle is done."""
    is_flagged: Callable[[], bool]
    """Returns whether a rank has raised its flag; as above."""


@final
class Ledger:
    """Notes of this rank that are to be compared with those of other ranks.

    Args:
        probes: Whether :meth:`is_alike` is asked. Then ranks compare by an all-gather. Otherwise they compare by
            messages that only ranks in the same call receive.

    Attributes:
        is_paced: Whether somebody begins a comparison before each step, so that nobody else has to.
        is_flagged: Whether a rank had raised its flag in a comparison that is over.
    """

    def __init__(self, *, probes: bool = False) -> None:
        self.is_paced = self.is_flagged = False
        self._probes = probes
        self._notes: list[tuple[Topic, Any]] = []
        self._begun: _Comparison | None = None
        self._is_over = True

    def note(self, topic: Topic, value: Any) -> None:
        """Let the next comparison include ``value``, which must be the same on all ranks.

        Args:
            topic: What it is.
            value: Plain values, which have the same text in two processes if they are equal.
        """
        self._notes.append((topic, value))

    def compare(self, doing: str, group: dist.ProcessGroup | None = None) -> None:
        """Compare all notes now, and wait for the result. Collective over ``group``.

        Args:
            doing: Purpose, in words that continue "waits for"; the same on all ranks.
            group: Ranks that compare; ``None``: all.

        Raises:
            SMPError: The error of the first topic that differs, on all ranks.
            ApartError: Ranks are in different calls.
        """
        notes, self._notes = self._notes, []
        if dist.get_world_size(group) > 1 and len(set(collectives.gather_numbers(_digest(notes), doing, group))) > 1:
            _raise_difference(notes, doing, group)

    def begin(self, doing: str, group: dist.ProcessGroup | None = None, *, flag: bool = False) -> None:
        """Begin to compare all notes, once the last comparison is over. Collective over ``group``.

        Args:
            doing, group: As for :meth:`compare`.
            flag: Flag of this rank; see :attr:`is_flagged`.

        Raises:
            SMPError: Notes of the last comparison differ.
        """
        self.check()
        notes, self._notes = self._notes, []
        if dist.get_world_size(group) == 1:
            self.is_flagged |= flag
            return
        digest = _digest(notes)
        if self._probes:
            mine = torch.tensor([digest], device="cpu")
            found = [torch.full_like(mine, -1) for _ in range(dist.get_world_size(group))]
            handle = collectives.all_gather(found, mine, group=group, doing=doing)
            self._begun = _Comparison(notes, doing, group, handle, lambda: any(each != mine for each in found), bool)
        else:
            extremes = torch.tensor([digest, -digest, int(flag)], device="cpu")
            handle = collectives.reduce_numbers(extremes, dist.ReduceOp.MAX, group=group, doing=doing)
            self._begun = _Comparison(
                notes,
                *(doing, group, handle),
                differs=lambda: bool(extremes[0] != -extremes[1]),
                is_flagged=lambda: bool(extremes[2]),
            )
        self._is_over = False

    def is_alike(self) -> bool:
        """Whether the notes of the comparison that has begun last are known to be the same; does not wait."""
        begun = self._begun
        return begun is not None and begun.handle.is_done() and not begun.differs()

    def check(self) -> None:
        """Wait for the comparison that has begun, if any. Collective over its ranks.

        Raises:
            SMPError: The error of the first topic that differs, on all ranks.
        """
        begun = self._begun
        if begun is None or self._is_over:
            return
        self._is_over = True
        begun.handle.wait()
        self.is_flagged |= begun.is_flagged()
        if begun.differs():
            _raise_difference(begun.notes, begun.doing, begun.group)

    def clear(self) -> None:
        """Forget all notes and the comparison that has begun: an error has ended the run, and ranks may be anywhere."""
        self._notes.clear()
        self._begun = None
        self.is_flagged = False

    def settle(self, doing: str, group: dist.ProcessGroup | None = None) -> None:
        """Check, and compare notes that have not been sent, before values leave the ranks. Collective.

        Args:
            doing, group: As for :meth:`compare`.
        """
        self.check()
        if self._notes:
            self.compare(doing, group)


def _digest(notes: Sequence[tuple[Topic, Any]]) -> int:
    text = hashlib.blake2b(digest_size=7)
    for topic, value in notes:
        plain = sorted(value.items()) if isinstance(value, Mapping) else value
        text.update(f"{topic.name} {plain!r}\n".encode(errors="surrogatepass"))
    return int.from_bytes(text.digest())


def _raise_difference(notes: Sequence[tuple[Topic, Any]], doing: str, group: dist.ProcessGroup | None) -> None:
    # A rank that has noted something else may still be in its step, and wait for this one.
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    everyones = dict(zip(ranks, collectives.gather_objects(list(notes), f"{doing} that differ", group), strict=True))
    topics = dict.fromkeys(topic for noted in everyones.values() for topic, _ in noted)
    for topic in topics:
        values = ([value for other, value in noted if other == topic] for noted in everyones.values())
        for each in zip_longest(*values, fillvalue=()):
            if len(set(map(repr, each))) > 1:
                raise topic.explain(dict(zip(everyones, each, strict=True)))
    raise AssertionError(f"digests of equal notes differ: {notes}")
