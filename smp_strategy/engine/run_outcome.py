"""Outcome of a run: an error that has ended a step, a backward or an update decides how the next run begins.

After an error in a step or in its backward the weights are those before it, but its collectives and gradients are
unfinished. So the next run that trains begins with a full module, which is sharded again.

An update changes weights on each rank by itself. If an error ends it on all ranks (the optimizer raises, and the script
catches the error and goes on), each parameter has the value that its owners have given it, as in a single process. If
it ends the update on some ranks only, these have other weights than the rest, and no run may go on with the module.

[Note: saving after an error] Saving takes all ranks. If an error has stopped only one of them, the others wait
elsewhere, and it would wait for them forever. If the error has stopped all ranks at the same place between two steps (a
signal that the Trainer has noticed, a callback that gives up), their state is consistent, and they can save. They vote
in the store of the process group: each rank counts itself at its place, the last one answers yes, and a rank that has
waited too long answers no. The first answer counts.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final

import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.background_call import BackgroundCall
from smp_strategy.distributed.failure import current_run, publish_own
from smp_strategy.distributed.torch_private import default_store
from smp_strategy.errors import SMPError

__all__ = ["BrokenUpdates", "RunOutcome", "have_all_stopped"]

_KEY: Final = "smp/broken_update"
# Ranks that fail in the same update do so within this time of each other.
_PATIENCE_SECONDS: Final = 5.0
_STOPPED: Final = "smp_strategy/stopped"
_PAUSE_SECONDS: Final = 0.05
_YES, _NO = "yes", "no"
# Timeout for an answer of the store.
_ANSWER_SECONDS: Final = 5.0


@final
class BrokenUpdates:
    """Updates of this rank that errors have ended.

    Attributes:
        has_part: Whether one of them was of a part of the parameters, and other ranks update the rest.
    """

    def __init__(self) -> None:
        self.has_part = False
        self._count = self._num_compared = 0

    def note(self, *, is_of_part: bool) -> None:
        """Note that an error has ended an update."""
        self.has_part = self.has_part or is_of_part
        self._count += 1

    def compare(self) -> None:
        """Compare with the other ranks, by the store, if there are new ones; before weights are used or saved.

        Ranks without new ones need not come here. An error is published, so that they learn of it where they wait.

        Raises:
            SMPError: an error has ended the last update on some ranks only.
        """
        if self._count == self._num_compared:
            return
        self._num_compared = self._count
        try:
            _refuse_mixture(_ranks_that_say(f"{_KEY}/{current_run()}/{self._count}"))
        except SMPError as error:
            publish_own(error)
            raise


def _refuse_mixture(are_broken: Sequence[bool]) -> None:
    """Refuse weights if an error has ended the last update on some ranks only.

    Raises:
        SMPError: it has on some, but not on all.
    """
    broken = [rank for rank, is_broken in enumerate(are_broken) if is_broken]
    if 0 < len(broken) < len(are_broken):
        raise SMPError(
            f"An error has ended the last optimizer step on ranks {broken} of {len(are_broken)}, and the others have "
            "updated their shares of the module: it is a mixture of two steps. Make the module again, and load a "
            "checkpoint into it."
        )


def _ranks_that_say(word: str) -> list[bool]:
    """Say ``word`` to the other ranks; returns which ranks have said it after a moment."""
    store, rank = default_store(), dist.get_rank()
    keys = [f"{word}/{other}" for other in range(dist.get_world_size())]

    def listen() -> list[bool]:
        store.set(keys[rank], "")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [store.check([key]) for key in keys]

    call = BackgroundCall(listen)
    is_answered = call.within(_PATIENCE_SECONDS + _ANSWER_SECONDS)
    return call.get() if is_answered else [other == rank for other in range(len(keys))]


@final
class RunOutcome:
    """Errors that have ended actions of this rank.

    Attributes:
        has_failed: Whether an error has ended the last step, its backward or an update.
        has_broken_update: Whether an error has ended an update of this rank's share.
    """

    def __init__(self) -> None:
        self.has_failed = self.has_broken_update = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of a step, or of its backward."""
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise
        self.has_failed = False

    def end(self, *, failed: bool, has_broken_update: bool) -> None:
        """Note the errors that are known at the end of the run."""
        self.has_failed = self.has_failed or failed or has_broken_update
        self.has_broken_update = self.has_broken_update or has_broken_update

    def agree(self) -> None:
        """Note the errors of all ranks. Collective.

        Raises:
            SMPError: an error has ended the update of some ranks, and the others have updated their shares.
        """
        everyones = collectives.gather_objects((self.has_failed, self.has_broken_update), "the end of the last run")
        self.has_failed = any(failed for failed, _ in everyones)
        _refuse_mixture([is_broken for _, is_broken in everyones])


def have_all_stopped(place: str | None) -> bool:
    """Vote whether all ranks have stopped at the same ``place``, which is ``None`` in the middle of a step; all voters
    get the same answer.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return place is not None
    store = default_store()
    key = f"{_STOPPED}/{store.add(f'{_STOPPED}/count/{dist.get_rank()}', 1)}"
    deadline = time.monotonic() + _PATIENCE_SECONDS
    if place is not None and store.add(f"{key}/at/{place}", 1) == dist.get_world_size():
        answer = _answered(store, key, _YES)
    elif place is None:
        answer = _answered(store, key, _NO)
    else:
        while not store.check([f"{key}/answer"]) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        answer = _answered(store, key, _NO)
    return answer == _YES


def _answered(store: dist.Store, key: str, answer: str) -> str:
    return store.compare_set(f"{key}/answer", "", answer).decode()
