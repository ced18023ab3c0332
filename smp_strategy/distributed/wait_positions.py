"""Can a rank that waits for others ever go on?

Ranks wait for a collective that others have not begun, or for a message that another has not sent. Each that has
waited for a while tells what it waits for, and what it has begun and sent itself: its *position*. From these follows,
by a pure function, who can never go on. A rank that tells nothing is at work and may still do whatever is missing.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Condition", "Position", "blockers", "is_deadlock", "story"]


class Condition(NamedTuple):
    """Something that a rank must have done."""

    rank: int
    """Who."""
    channel: str
    """A process group, or the messages from one rank to another."""
    number: int
    """Of the collective in its group, from 1 on, or the tag of the message."""


class Position(NamedTuple):
    """Where a rank is."""

    tick: int
    """How often it has told its position: one that tells it again is still alive, and still there."""
    turn: int
    """Number of its wait, to see whether it has gone on; 0: it is at work."""
    needs: Sequence[Sequence[Condition]]
    """What it waits for: one of these lists has to be met, all of it."""
    begun: Mapping[str, tuple[int, Sequence[str]]]
    """How many collectives it has begun in each channel, and what the latest of them were, in words."""
    sent: Collection[tuple[str, int]]
    """Channel and tag of the messages that it has sent in this step."""
    doing: str
    """What it waits for, in words; the same for all that take part in a collective."""
    place: str
    """Where in the user's code."""
    process: tuple[str, int]
    """Name of the machine, and number of the process there."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is not at work."""
        return self.turn > 0

    def stands_still(self, before: "Position | None") -> bool:
        """Whether it was in the same wait all the time since it told the position ``before``."""
        return before is not None and self.is_waiting and self.tick > before.tick and self.turn == before.turn

    def encode(self) -> str:
        """As text."""
        return json.dumps(self._replace(sent=sorted(self.sent)))

    @classmethod
    def decode(cls, text: str) -> "Position":
        """From text."""
        tick, turn, needs, begun, sent, doing, place, process = json.loads(text)
        needs = [[Condition(*condition) for condition in conditions] for conditions in needs]
        return cls(tick, turn, needs, begun, {tuple(message) for message in sent}, doing, place, tuple(process))


def is_deadlock(rank: int, positions: Mapping[int, Position]) -> bool:
    """Whether ``rank`` can never go on.

    Args:
        rank: who asks.
        positions: of the ranks that wait; others are at work.
    """
    stuck = {other for other, position in positions.items() if position.is_waiting}
    while going := {other for other in stuck if _can_go_on(positions[other], positions, stuck)}:
        stuck -= going
    return rank in stuck


def blockers(rank: int, positions: Mapping[int, Position]) -> set[int]:
    """The ranks at work that ``rank`` waits for, through others that wait as well; ``positions`` as above."""
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


def story(positions: Mapping[int, Position]) -> str:
    """What is said of ranks that wait for each other."""
    lines = "\n".join(f"  rank {rank}: for {each.doing}; {each.place}" for rank, each in sorted(positions.items()))
    return (
        f"The ranks of this run wait for each other for ever:\n{lines}\n"
        "All of them must run the same code. What only some ranks do is the usual reason: a value that is read "
        "(`if trainer.is_global_zero: print(loss.item())`), a call that all ranks must make (`if "
        "accelerator.is_main_process: accelerator.save_state()`, `trainer.save_checkpoint`, a call of the model under "
        "`@rank_zero_only`), a stop, or fewer batches. Do it on all ranks, or use `self.log` or `self.print`."
    )


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
    # It may have begun something else there.
    return count - number >= len(latest) or latest[number - count - 1] == asking.doing
