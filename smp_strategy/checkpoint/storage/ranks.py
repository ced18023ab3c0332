"""Collectives of ranks that write a checkpoint together; an error of one rank becomes an error of all."""

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import CheckpointError, cause_of

__all__ = ["StorageRanks"]

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

    def first_does(self, what: Callable[[], T], failure: str) -> T:
        """Call ``what`` on the first rank and broadcast its result, or a CheckpointError that begins with
        ``failure``."""
        found, error = _outcome(what, self.rank == 0)
        if self._group is None:
            message = self._message(error)
        else:
            both = found, self._message(error)
            found, message = collectives.tell(both, self._first, "what the first rank writes", self._group)
        if message:
            raise CheckpointError(f"{failure} {message}") from error
        return found

    def all_do(self, what: Callable[[], T], failure: str) -> list[T]:
        """Call ``what`` on all ranks and gather the results on the first; other ranks get their own.

        If a rank fails, all of them get a CheckpointError that begins with ``failure`` and names it.
        """
        found, error = _outcome(what, True)
        outcomes: list[Any] = [(found, self._message(error))]
        if self._group is not None:
            outcomes = collectives.collect(outcomes[0], self._first, "the end of writing", self._group)
        failed = self.first_does(lambda: [message for _, message in outcomes if message], failure)
        if failed:
            raise CheckpointError(f"{failure} {' '.join(failed)}") from error
        return [result for result, _ in outcomes] if self.rank == 0 else [found]

    def _message(self, error: BaseException | None) -> str:
        if error is None:
            return ""
        what = str(error) if isinstance(error, CheckpointError) else cause_of(error)
        return f"Rank {self.rank}: {what}" if self.size > 1 else what


def _outcome(what: Callable[[], T], is_called: bool) -> tuple[Any, Exception | None]:
    if not is_called:
        return None, None
    try:
        return what(), None
    except Exception as error:
        return None, error
