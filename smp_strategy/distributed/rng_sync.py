"""Random generators of ranks that read the same samples: kept in step, with a check for ranks that have diverged.

Each rank reads its own data and nothing is sent, so the ranks of a replica must agree on every random draw on the way
to a batch: the order of samples, seeds of workers, augmentation in the dataset. Nobody may have seeded anything, and
some code runs on one rank only. So ranks take over the generators of the first of them; the integrations decide when,
since they know what else draws.

Differences that cannot be controlled (an iterable dataset that splits its samples by rank, a dataset with generators of
its own) are detected by comparing a checksum of the first batches.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rng_state import RngState, capture, drawing_from, global_state, restore
from smp_strategy.distributed.same_inputs import digest_of
from smp_strategy.errors import SMPError

__all__ = ["BatchSource", "DataReaders", "LoaderState"]

_CHECKED_BATCHES = 2


class BatchSource(NamedTuple):
    """Composition of a batch, as its data loader knows it."""

    number: int
    """Number of samples in it."""
    lists: frozenset[tuple[Any, ...]] = frozenset()
    """Paths of lists in it with one tensor per sample."""
    others: tuple[int, ...] = ()
    """Numbers of samples that other loaders have put into it."""


class LoaderState(Protocol):
    """Random state and checks of a pass over a data loader."""

    def begin(self, *generators: torch.Generator) -> None:
        """Begin a pass of a loader that has these ``generators`` of its own. Collective."""

    def go_on(self) -> None:
        """Resume a pass that an earlier run has begun."""

    def state(self) -> RngState:
        """State from which the next draw on the way to a batch starts."""

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """Context that draws from ``state`` on; the generators are restored afterwards."""

    def draws(self) -> AbstractContextManager[None]:
        """Context of code that draws random numbers on the way to a batch."""

    def compare(self, what: Any) -> None:
        """Compare a number of batches, or whether there is one more, with ranks whose samples belong together."""

    def arrived(self, batch: Any, read: BatchSource | None) -> None:
        """Note a batch, or the object that says that there are no more."""


class DataReaders:
    """Ranks that read the same samples as this one. Its methods are collective. An unpickled copy has no other ranks.

    Args:
        ranks: Global ranks; the others follow the first.
        rank: This rank.
        group: Returns their process group. It is not kept: groups must end before the process does.
        advice: Advice for the error message about a dataset that picks its samples by rank.
        partners: Returns the group of ranks that read other samples for the same steps; ``None``: there are none.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: Callable[[], dist.ProcessGroup],
        *,
        advice: str,
        partners: Callable[[], dist.ProcessGroup | None] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._group = group
        self._advice = advice
        self._partners = partners
        self._num_checked = 0

    def __reduce__(self) -> Any:
        return _Alone, ()

    def __deepcopy__(self, memo: Any) -> "DataReaders":
        return self

    def take_over(self, *generators: torch.Generator) -> None:
        """Take over the global generators, and ``generators``, of the first rank."""
        if len(self.ranks) == 1:
            return
        first = self.ranks[0]
        every = [torch.default_generator, *generators]
        state = collectives.tell(capture(every), first, "the beginning of a pass over a data loader", self._group())
        restore(state, every)

    def go_on(self) -> None:
        """Begin or resume a pass: its next batches are compared."""
        self._num_checked = 0

    def state(self) -> RngState:
        """State from which the next draw on the way to a batch starts."""
        return global_state()

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """Context that draws from ``state`` on; the generators are restored afterwards."""
        return drawing_from(state)

    def check(self, batch: Any) -> None:
        """Compare the first batches of each pass over the data.

        Raises:
            SMPError: they differ.
        """
        if len(self.ranks) == 1 or self._num_checked == _CHECKED_BATCHES:
            return
        found = collectives.gather_numbers(
            digest_of(batch, most=None, texts=True).number, "a comparison of batches", self._group()
        )
        if len(set(found)) > 1:
            raise SMPError(
                f"Batch {self._num_checked} differs between the ranks of one replica {self.ranks}, which must all read "
                f"the same samples. {self._advice}; one with random generators of its own must seed them alike."
            )
        self._num_checked += 1

    def compare(self, what: Any) -> None:
        """Compare the number of batches that each rank will read, or whether it has read one.

        Raises:
            SMPError: ranks whose samples belong together differ, on all of them.
        """
        if self._partners is None:
            return
        group = self._partners()
        found = collectives.gather_objects(what, "a comparison of how many batches there are", group)
        if any(each != found[0] for each in found):
            raise SMPError(
                f"With `prescaled_batch=False` a step needs samples of all ranks of a tensor-parallel group, but they "
                f"do not have the same number of batches ({', '.join(map(str, found))}). Let the dataset give each "
                "rank as many, as data-parallel training needs it as well."
            )


class _Alone:
    """Loader state in a process to which only the loader was sent."""

    def begin(self, *generators: torch.Generator) -> None:
        """Nothing to do."""

    def go_on(self) -> None:
        """Nothing to do."""

    def state(self) -> RngState:
        """State from which the next draw starts."""
        return global_state()

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """Context that draws from ``state`` on."""
        return drawing_from(state)

    def draws(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def compare(self, what: Any) -> None:
        """Nothing to do."""

    def arrived(self, batch: Any, read: BatchSource | None) -> None:
        """Nothing to do."""
