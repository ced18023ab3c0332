"""Random generators of ranks that read the same samples: kept in step, with a check for ranks that have diverged.

Each rank reads its own data and nothing is sent, so the ranks of a replica must agree on every random draw on the way
to a batch: the order of samples, seeds of workers, augmentation in the dataset. Nobody may have seeded anything, and
some code runs on one rank only. So ranks take over the generators of the first of them; the integrations decide when,
since they know what else draws.

Differences that cannot be controlled (a dataset with generators of its own, which the system seeds, or an iterable
dataset that splits its samples by rank) are detected by comparing a checksum of the first batches. If samples have
numbers, all ranks have asked for the same ones, and the first rank sends its batches to the others from then on. So it
does from the beginning with the option ``share_batches``. Other differences are an error.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.same_inputs import digest_of
from smp_strategy.distributed.agreement.topics import NUM_BATCHES
from smp_strategy.distributed.rng_state import (
    RngState,
    capture,
    drawing_from,
    generators_of,
    global_state,
    restore,
    set_global_state,
)
from smp_strategy.distributed.torch_private import default_group
from smp_strategy.errors import SMPError
from smp_strategy.model.samples import BatchSource

__all__ = ["BatchSource", "DataReaders", "OwnStream"]

_CHECKED_BATCHES = 2
_COMPARISON: Final = "a comparison of batches"
_SHARING: Final = "a batch of the first rank of a replica"
_END: Final = -1  # no checksum
_SHARED: Final = (
    "The ranks of a replica have read different batches, although they have asked for the same samples: the dataset "
    "draws by a generator that the system seeds. From now on the first rank of each replica sends its batches to the "
    "others, as with `share_batches=True`. To save that, seed the generator alike on all ranks."
)
_LOG: Final = logging.getLogger("smp_strategy")


class DataReaders:
    """Random state and checks of passes over data loaders, for the ranks that read the same samples as this one.

    Its methods are collective. An unpickled copy has no other ranks.

    Args:
        ranks: Global ranks; the others follow the first.
        rank: This rank.
        group: Returns their process group. It is not kept: groups must end before the process does.
        advice: Advice for the error message about a dataset that picks its samples by rank.
        partners: Returns the group of ranks that read other samples for the same steps; ``None``: there are none.
        shares: Whether the first rank sends its batches to the others.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: Callable[[], dist.ProcessGroup],
        *,
        advice: str = "",
        partners: Callable[[], dist.ProcessGroup | None] | None = None,
        shares: bool = False,
    ) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._group = group
        self._advice = advice
        self._partners = partners
        self._num_checked = 0
        self._shares = shares

    def __reduce__(self) -> Any:
        return _alone, ()

    def __deepcopy__(self, memo: Any) -> "DataReaders":
        return self

    def take_over(self, *generators: torch.Generator, device: torch.device | None = None) -> None:
        """Take over the global generators, that of ``device`` included, and ``generators``, of the first rank."""
        if len(self.ranks) == 1:
            return
        first = self.ranks[0]
        every = [*generators_of(device or torch.device("cpu")), *generators]
        state = collectives.tell(capture(every), first, "the beginning of a pass over a data loader", self._group())
        restore(state, every)

    def begin(self, *generators: torch.Generator) -> None:
        """Begin a pass of a loader that has these ``generators`` of its own."""
        self.take_over(*generators)
        self.go_on()

    def draws(self) -> AbstractContextManager[None]:
        """Context of code that draws random numbers on the way to a batch."""
        return nullcontext()

    def arrived(self, batch: Any, read: BatchSource | None) -> tuple[Any, BatchSource | None]:
        """Note a batch; the one that this rank is to use."""
        return batch, read

    def ended(self) -> None:
        """Note that there are no more."""

    def go_on(self) -> None:
        """Begin or resume a pass: its next batches are compared."""
        self._num_checked = 0

    def state(self) -> RngState:
        """State from which the next draw on the way to a batch starts."""
        return global_state()

    def elsewhere(self, state: RngState) -> AbstractContextManager[None]:
        """Context that draws from ``state`` on; the generators are restored afterwards."""
        return drawing_from(state)

    def agreed(self, batch: Any, read: BatchSource | None) -> tuple[Any, BatchSource | None]:
        """The batch that all ranks use, and its source: this rank's, if the first batches of each pass are alike.

        Raises:
            SMPError: they differ, and not only by what a dataset draws.
        """
        if len(self.ranks) == 1 or (self._num_checked == _CHECKED_BATCHES and not self._shares):
            return batch, read
        if not self._shares:
            found = collectives.gather_numbers(
                digest_of(batch, most=None, texts=True).number, _COMPARISON, self._group()
            )
            self._num_checked += 1
            if len(set(found)) == 1:
                return batch, read
            is_drawn = read is not None and read.is_of_numbers
            self._shares = all(collectives.gather_numbers(int(is_drawn), _COMPARISON, self._group()))
            if not self._shares:
                raise self._difference()
            if self._rank == self.ranks[0]:
                _LOG.warning(_SHARED)
        told = collectives.tell((batch, read), self.ranks[0], _SHARING, self._group())
        if told is None:
            raise self._difference()
        return told

    def agree_on_end(self) -> None:
        """Tell the ranks that this one has read all batches.

        Raises:
            SMPError: another one has not.
        """
        if len(self.ranks) == 1:
            return
        if self._shares:
            is_over = collectives.tell(None, self.ranks[0], _SHARING, self._group()) is None
        elif self._num_checked < _CHECKED_BATCHES:
            found = collectives.gather_numbers(_END, _COMPARISON, self._group())
            is_over, self._num_checked = len(set(found)) == 1, self._num_checked + 1
            if not is_over:
                collectives.gather_numbers(0, _COMPARISON, self._group())
        else:
            return
        if not is_over:
            raise self._difference()

    def _difference(self) -> SMPError:
        number = "A batch" if self._shares else f"Batch {self._num_checked - 1}"
        return SMPError(
            f"{number} differs between the ranks of one replica {self.ranks}, which must all read the same samples. "
            f"{self._advice}; one with random generators of its own must seed them alike, or set `share_batches=True`: "
            "the first rank of a replica sends its batches to the others."
        )

    def compare(self, what: Any) -> None:
        """Compare the number of batches that each rank will read, or whether it has read one.

        Raises:
            SMPError: ranks whose samples belong together differ, on all of them.
        """
        if self._partners is None:
            return
        Ledger().note(NUM_BATCHES, what).compare("a comparison of how many batches there are", self._partners())


class OwnStream(DataReaders):
    """Readers whose data path has generator states of its own. See [Note: data stream] of Lightning's data.

    While nothing else draws, the global state moves along with the stream.
    """

    def __init__(self, *ranks: Any, **options: Any) -> None:
        super().__init__(*ranks, **options)
        self._state = global_state()

    def begin(self, *generators: torch.Generator) -> None:
        """Take over the global generators, and ``generators``, of the first rank. Collective."""
        super().begin(*generators)
        self._state = global_state()

    def state(self) -> RngState:
        """The generator state at which the next draw of the data path starts."""
        return self._state

    def set_state(self, state: RngState) -> None:
        """Set the generator state at which the next draw of the data path starts."""
        self._state = state

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Draw from the data stream while this is open."""
        others = global_state()
        nobody_else_drew = others == self._state
        if not nobody_else_drew:
            set_global_state(self._state)
        try:
            yield
        finally:
            self._state = global_state()
            if not nobody_else_drew:
                set_global_state(others)


def _alone() -> DataReaders:
    return DataReaders((0,), 0, default_group)
