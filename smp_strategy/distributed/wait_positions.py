"""Wait positions: the state that ranks publish while they wait, and the decision whether a wait can ever end.

Ranks wait for a collective that others have not begun, or for a message that another has not sent. Each rank that has
waited for a while publishes its *position*: the condition it waits for, and the collectives and messages that it has
begun and sent. A pure function of the positions tells which ranks can never continue. A rank that publishes nothing is
at work and may still do whatever is missing.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from smp_strategy.errors import DoorWords

__all__ = ["Condition", "Position", "blockers", "is_deadlock", "story"]


class Condition(NamedTuple):
    """Collective or message that a rank must have begun."""

    rank: int
    """Global rank."""
    channel: str
    """Process group, or the messages from one rank to another."""
    number: int
    """Number of the collective in its group, from 1 on, or tag of the message."""


class Position(NamedTuple):
    """State of a rank for deadlock detection."""

    tick: int
    """Count of published positions: a rank that publishes again is alive, and still there."""
    turn: int
    """Number of its wait, to see whether it is still the same; 0: it is at work."""
    needs: Sequence[Sequence[Condition]]
    """Alternatives that end the wait: lists of conditions, of which one has to be met entirely."""
    begun: Mapping[str, tuple[int, Sequence[str]]]
    """Number of collectives begun in each channel, and the purposes of the latest ones."""
    sent: Collection[tuple[str, int]]
    """Channel and tag of the messages sent in this step."""
    doing: str
    """Purpose of the wait; the same on all ranks of a collective."""
    place: str
    """Place in the user's code."""
    process: tuple[str, int]
    """Names of the host and of its space of process ids, and process id."""
    read: tuple[int, bool] = (0, False)
    """Number of batches that the latest pass over a data loader has given, and whether there are no more."""

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits, and is not at work."""
        return self.turn > 0

    def stands_still(self, before: "Position | None") -> bool:
        """Whether the rank has been in the same wait since it published the position ``before``."""
        return before is not None and self.is_waiting and self.tick > before.tick and self.turn == before.turn

    def encode(self) -> str:
        """Serialise to text."""
        return json.dumps(self._replace(sent=sorted(self.sent)))

    @classmethod
    def decode(cls, text: str) -> "Position":
        """Inverse of :meth:`encode`."""
        tick, turn, needs, begun, sent, doing, place, process, read = json.loads(text)
        needs = [[Condition(*condition) for condition in conditions] for conditions in needs]
        return cls(
            tick, turn, needs, begun, {tuple(message) for message in sent}, doing, place, tuple(process), tuple(read)
        )


def is_deadlock(rank: int, positions: Mapping[int, Position]) -> bool:
    """Whether the wait of ``rank`` can never end."""
    stuck = {other for other, position in positions.items() if position.is_waiting}
    while going := {other for other in stuck if _can_go_on(positions[other], positions, stuck)}:
        stuck -= going
    return rank in stuck


def blockers(rank: int, positions: Mapping[int, Position]) -> set[int]:
    """Ranks at work that ``rank`` waits for, directly or through ranks that wait; ``positions`` as above."""
    found: set[int] = set()
    asked, open_ends = {rank}, [rank]
    while open_ends:
        position = positions[open_ends.pop()]
        conditions = {c.rank for needs in position.needs for c in needs if not _is_met(c, position, positions)}
        for other in conditions - asked:
            asked.add(other)
            if other in positions and positions[other].is_waiting:
                open_ends.append(other)
            else:
                found.add(other)
    return found


def story(positions: Mapping[int, Position], words: "DoorWords") -> str:
    """Error message, in ``words`` of the user's door, about ranks that wait for each other."""
    has_fewer = any(is_over for _, is_over in (each.read for each in positions.values()))
    has_fewer = has_fewer and len({each.read for each in positions.values()}) > 1
    lines = "\n".join(
        f"  rank {rank}: for {each.doing}; {each.place}{_read(each) if has_fewer else ''}"
        for rank, each in sorted(positions.items())
    )
    reason = "Data loaders have given fewer batches on some ranks: all need equally many. " if has_fewer else ""
    return (
        f"The ranks of this run wait for each other for ever:\n{lines}\n{reason}"
        "All of them must run the same code. What only some ranks do is the usual reason: a value that is read "
        f"(`{words.on_one}print(loss.item())`), a call that all ranks must make ({words.on_one_saves}, a call of the "
        f"model under such a condition), a stop, or fewer batches. Do it on all ranks, or use {words.tell}."
    )


def _read(position: Position) -> str:
    number, is_over = position.read
    return f"; its data loader has given {number} batches{', and has no more' if is_over else ''}"


def _can_go_on(position: Position, positions: Mapping[int, Position], stuck: Collection[int]) -> bool:
    return any(
        all(condition.rank not in stuck or _is_met(condition, position, positions) for condition in conditions)
        for conditions in position.needs
    )


def _is_met(condition: Condition, asking: Position, positions: Mapping[int, Position]) -> bool:
    other = positions.get(condition.rank)
    if other is None:
        return False
    _, channel, number = condition
    if (channel, number) in other.sent:
        return True
    if channel not in other.begun:
        return False
    count, latest = other.begun[channel]
    if count < number:
        return False
    # It may have begun another collective under that number.
    return count - number >= len(latest) or latest[number - count - 1] == asking.doing
