"""Ranks that wait for each other for ever are told so, instead of waiting for ever.

All stages must run the same program. One that reads a value which the others do not read (``if is_global_zero:
print(loss.item())``) waits for a message that nobody sends, and soon all wait for all. So a rank that has waited for a
while writes into the store of the process group what it waits for and what it has sent, reads what the others have
written, and looks for a circle. A rank that is merely slow has written nothing, and is waited for.

Nothing of this happens while messages arrive in time.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch.distributed as dist

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.arrivals import Arrival

__all__ = ["PATIENCE_SECONDS", "PAUSE_SECONDS", "Position", "Watch", "is_deadlock", "user_code"]

PATIENCE_SECONDS = 5.0
# Between two looks that must show the same.
PAUSE_SECONDS = 1.0
_KEY = "smp_strategy/waiting"
_OURS = (
    *("torch", "smp_strategy", "threading", "concurrent", "queue", "contextlib"),
    *("accelerate", "lightning", "pytorch_lightning", "transformers"),
)

T = TypeVar("T")


class Position(NamedTuple):
    """Where a rank waits."""

    turn: int
    """Number of its wait, to see whether it has gone on."""
    needs: Sequence[tuple[int, int]]
    """Sender and tag of the messages of which one would help; none at the end of a step, where all ranks meet."""
    sent: Sequence[tuple[int, int]]
    """Receiver and tag of every message that it has sent in this step."""
    place: str
    """Where in the user's code, for messages."""


@final
class Watch:
    """Waits, and notices when what is waited for cannot come.

    Args:
        rank: this rank.
        ranks: the ranks that exchange messages.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self._rank = rank
        self._ranks = ranks
        self._turn = 0
        self._seen: Mapping[int, Position] | None = None

    def wait(self, arrival: Arrival[T], needs: Sequence[tuple[int, int]], sent: Collection[tuple[int, int]]) -> T:
        """Block until ``arrival`` is over, and return what has come.

        Args:
            arrival: what is waited for.
            needs: sender and tag of the message; nothing at the end of a step.
            sent: receivers and tags of what this rank has sent.

        Raises:
            UnsupportedError: it cannot come, because its sender waits for this rank.
        """
        patience = PATIENCE_SECONDS
        while not arrival.is_over and not arrival.within(patience):
            self.look(needs, sent)
            patience = PAUSE_SECONDS
        self.go_on()
        return arrival.value

    def look(self, needs: Sequence[tuple[int, int]], sent: Collection[tuple[int, int]]) -> None:
        """Called again and again while this rank waits for one of the messages ``needs``.

        Raises:
            UnsupportedError: none of them can come.
        """
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_KEY}/{self._rank}", json.dumps(Position(self._turn, needs, sorted(sent), user_code())))
        before, self._seen = self._seen, _positions(store, self._ranks)
        if self._seen == before and is_deadlock(self._rank, self._seen):
            raise UnsupportedError(_story(self._seen))

    def go_on(self) -> None:
        """The wait is over."""
        if self._seen is not None:
            dist.distributed_c10d._get_default_store().delete_key(f"{_KEY}/{self._rank}")
            self._seen = None
        self._turn += 1


def is_deadlock(rank: int, positions: Mapping[int, Position]) -> bool:
    """Whether ``rank`` can never go on.

    Args:
        rank: who asks.
        positions: of the ranks that wait; others are at work.
    """
    stuck = set(positions)
    while going := {other for other in stuck if _can_go_on(other, positions, stuck)}:
        stuck -= going
    return rank in stuck


def _can_go_on(rank: int, positions: Mapping[int, Position], stuck: Collection[int]) -> bool:
    needs = positions[rank].needs
    if not needs:
        return all(other not in stuck or not position.needs for other, position in positions.items())
    return any(source not in stuck or (rank, tag) in positions[source].sent for source, tag in needs)


def _positions(store: dist.Store, ranks: Sequence[int]) -> dict[int, Position]:
    found = {}
    for rank in ranks:
        key = f"{_KEY}/{rank}"
        if store.check([key]):
            turn, needs, sent, place = json.loads(store.get(key))
            found[rank] = Position(turn, [(a, b) for a, b in needs], [(a, b) for a, b in sent], place)
    return found


def _story(positions: Mapping[int, Position]) -> str:
    places = "\n".join(f"  rank {other}: {position.place}" for other, position in sorted(positions.items()))
    return (
        f"The ranks of this pipeline wait for each other for ever:\n{places}\n"
        "All of them must run the same code. A value that only some ranks read (`if trainer.is_global_zero: "
        "print(loss.item())`) is the usual reason: read it on all ranks, or use `self.log` or `self.print`. So is a "
        "call that all ranks must make and only some do (`if accelerator.is_main_process: accelerator.save_state()`)."
    )


def user_code() -> str:
    """The innermost lines of the user's code in each thread that runs some."""
    lines = []
    for frame in sys._current_frames().values():
        here: Any = frame
        while here is not None:
            if str(here.f_globals.get("__name__", "")).split(".")[0] not in _OURS:
                lines.append(f"{here.f_code.co_filename}, line {here.f_lineno}, in {here.f_code.co_name}")
                break
            here = here.f_back
    return "; ".join(dict.fromkeys(lines)) or "at the end of its step"
