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
from typing import Any, NamedTuple, Self, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import SMPError

__all__ = ["Ledger", "Topic"]


class Topic(NamedTuple):
    """Something that all ranks must have alike. A constant of a module, since ranks send it to each other."""

    name: str
    explain: Callable[[Mapping[int, Any]], SMPError | None]
    """Makes the error, given the values by global rank; an empty tuple for a rank that has noted nothing.

    ``None``: these values may differ.
    """


Notes = Sequence[tuple[Topic, Any]]


@final
class Ledger:
    """Notes of this rank that are to be compared with those of other ranks.

    Args:
        probes: Whether :meth:`is_alike` is asked. Then ranks compare by an all-gather. Otherwise they compare where
            they are as well.

    Attributes:
        is_paced: Whether somebody begins a comparison before each step, so that nobody else has to.
        is_flagged: Whether a rank had raised its flag in a comparison that is over.
    """

    def __init__(self, *, probes: bool = False) -> None:
        self.is_paced = self.is_flagged = False
        self._probes = probes
        self._notes: list[tuple[Topic, Any]] = []
        self._was_alike = True
        self._begun: tuple[Handle[list[list[int]]], Callable[[], None]] | None = None

    def note(self, topic: Topic, value: Any) -> Self:
        """Let the next comparison include ``value``: plain values that have the same text wherever they are equal."""
        self._notes.append((topic, value))
        return self

    def compare(self, doing: str, group: dist.ProcessGroup | None = None) -> None:
        """Compare all notes now, and wait for the result; arguments and errors as for :meth:`begin`. Collective."""
        self.begin(doing, group)
        self.check()

    def begin(self, doing: str, group: dist.ProcessGroup | None = None, *, flag: bool = False) -> None:
        """Begin to compare all notes, once the last comparison is over. Collective over ``group``.

        Args:
            doing: Purpose, in words that continue "waits for"; the same on all ranks.
            group: Ranks that compare; ``None``: all.
            flag: Flag of this rank; see :attr:`is_flagged`.

        Raises:
            SMPError: Notes of the last comparison differ.
        """
        self.check()
        notes, self._notes = self._notes, []
        self.is_flagged |= flag and dist.get_world_size(group) == 1
        if dist.get_world_size(group) == 1:
            return
        mine = [_digest(notes), int(flag)]
        if self._probes:
            tensor = torch.tensor(mine, device="cpu")
            parts = [tensor.clone() for _ in range(dist.get_world_size(group))]
            gathered = collectives.all_gather(parts, tensor, group=group, doing=doing)
            handle = gathered.then(lambda _: [part.tolist() for part in parts])
        else:
            handle = collectives.compare_places(doing, group, mine)
        self._begun = handle, lambda: _raise_difference(notes, doing, group)

    @property
    def is_open(self) -> bool:
        """Whether a comparison has begun that nobody has waited for."""
        return self._begun is not None

    def is_alike(self) -> bool:
        """Whether the notes of the comparison that has begun last are known to be the same; does not wait."""
        if self._begun is not None and self._begun[0].is_done():
            return _are_alike(self._begun[0].wait())
        return self._begun is None and self._was_alike

    def check(self) -> None:
        """Wait for the comparison that has begun, if any. Collective over its ranks.

        Raises:
            SMPError: The error of the first topic that differs, on all ranks.
            ApartError: Ranks are in different calls.
        """
        if self._begun is None:
            return
        (handle, explain), self._begun = self._begun, None
        found = handle.wait()
        self.is_flagged |= any(flag for _, flag in found)
        self._was_alike = _are_alike(found)
        if not self._was_alike:
            explain()

    def settle(self, doing: str) -> None:
        """Check, and compare notes that no comparison has included yet, before values leave the ranks. Collective."""
        self.check()
        if self._notes:
            self.compare(doing)

    def clear(self) -> None:
        """Forget all notes and the comparison that has begun: an error has ended the run, and ranks may be anywhere."""
        self._notes, self._begun, self.is_flagged = [], None, False


def _digest(notes: Notes) -> int:
    text = hashlib.blake2b(digest_size=7)
    for topic, value in notes:
        plain = sorted(value.items()) if isinstance(value, Mapping) else value
        text.update(f"{topic.name} {plain!r}\n".encode(errors="surrogatepass"))
    return int.from_bytes(text.digest())


def _are_alike(found: Sequence[Sequence[int]]) -> bool:
    return len({digest for digest, *_ in found}) == 1


def _raise_difference(notes: Notes, doing: str, group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    # A rank that has noted something else may still be in its step, and wait for this one.
    everyones = dict(zip(ranks, collectives.gather_objects(notes, f"{doing} that differ", group), strict=True))
    for topic in dict.fromkeys(topic for noted in everyones.values() for topic, _ in noted):
        values = ([value for other, value in noted if other == topic] for noted in everyones.values())
        for each in zip_longest(*values, fillvalue=()):
            error = topic.explain(dict(zip(everyones, each, strict=True))) if len(set(map(repr, each))) > 1 else None
            if error is not None:
                raise error
