"""Ranks that read the same samples: how they agree on random draws, and how is found that they did not.

Each rank reads its own data and nothing is sent, so the ranks of one replica must agree on every random draw on the
way to a batch: the order of samples, seeds of workers, augmentation in the dataset. Nobody may have seeded anything,
and some code runs on one rank only. So ranks take over the generators of the first of them; when that happens is the
business of the doors, which know what else draws.

What cannot be steered (an iterable dataset that splits its samples by rank, a dataset with generators of its own) is
found by comparing a checksum of the first batches.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rng_state import RngState, capture, drawing_from, global_state, restore
from smp_strategy.errors import SMPError

__all__ = ["BatchSource", "DataReaders", "LoaderState", "checksum"]

_CHECKED_BATCHES = 2


class BatchSource(NamedTuple):
    """What a data loader knows of a batch."""

    number: int
    """How many samples it was put together of."""
    lists: frozenset[tuple[Any, ...]] = frozenset()
    """Paths of lists in it whose entries are tensors of these samples, one of each."""
    others: tuple[int, ...] = ()
    """Other numbers, of samples that other loaders have put into it."""


class LoaderState(Protocol):
    """What a pass over a data loader goes by."""

    def begin(self, *generators: torch.Generator) -> None:
        """A pass begins, of a loader that has these generators of its own. Collective."""

    def go_on(self) -> None:
        """A pass goes on that an earlier run has begun."""

    def state(self) -> RngState:
        """Where the next draw on the way to a batch starts."""

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """In here random numbers are drawn from ``state`` on; nothing of that is left afterwards."""

    def draws(self) -> AbstractContextManager[None]:
        """Around whatever draws random numbers on the way to a batch."""

    def compare(self, what: Any) -> None:
        """Compare a number of batches, or whether there is one more, with ranks whose samples belong together."""

    def arrived(self, batch: Any, read: BatchSource | None) -> None:
        """A batch is there, or the object that says that there are no more."""


class DataReaders:
    """The ranks that read what this one reads. Its methods are collective. A pickled one knows of nobody.

    Args:
        ranks: global ranks; the others follow the first.
        rank: this one.
        group: gives their process group. It is not kept: groups must end before the process does.
        advice: what a dataset that picks its samples by rank must go by instead.
        partners: gives the group of ranks that read other samples which the same steps need; ``None``: there are none.
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
        """A pass begins, or goes on: its next batches are compared."""
        self._num_checked = 0

    def state(self) -> RngState:
        """Where the next draw on the way to a batch starts."""
        return global_state()

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """In here random numbers are drawn from ``state`` on; nothing of that is left afterwards."""
        return drawing_from(state)

    def check(self, batch: Any) -> None:
        """Compare the first batches of each pass over the data.

        Raises:
            SMPError: they differ.
        """
        if len(self.ranks) == 1 or self._num_checked == _CHECKED_BATCHES:
            return
        found = collectives.gather_numbers(checksum(batch), "a comparison of batches", self._group())
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
    """What a pass goes by in a process that has only been sent its loader."""

    def begin(self, *generators: torch.Generator) -> None:
        """Nothing to do."""

    def go_on(self) -> None:
        """Nothing to do."""

    def state(self) -> RngState:
        """Where the next draw starts."""
        return global_state()

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """Draw from ``state`` on for a while."""
        return drawing_from(state)

    def draws(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def compare(self, what: Any) -> None:
        """Nothing to do."""

    def arrived(self, batch: Any, read: BatchSource | None) -> None:
        """Nothing to do."""


def checksum(batch: Any) -> int:
    """A number that depends on every tensor, number and string in ``batch``, and on their order."""
    found = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), found)
            content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found = zlib.crc32(content.numpy().data, found)
        elif isinstance(leaf, (bool, int, float, str, bytes)):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found
