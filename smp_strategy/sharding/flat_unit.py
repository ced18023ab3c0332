"""A unit whose parameters are spread over the ranks of a shard group.

What happens to a unit in a step::

    gather  ->  wait  ->  forward  ->  free            and once more around its backward, then
    collect ->  reduce                                 for every microbatch, or for some of them
    wait_reduced, pieces_shown: the optimizer's step   once

Nothing here knows when: hooks, prefetch and the pipeline are the caller's, who does the same on all ranks of the group.
A unit that is used twice in a forward can be gathered and freed twice; its gradients are collected whenever they are
there, and reduced once, when both uses are through. What a rank has no gradient of counts as zero there, so nobody
waits for an unused parameter. One that no rank has used has no gradient in one process, and optimizers pass it over:
where ranks have exchanged what they have used, it has none here either.

For the optimizer every parameter is, for a moment, this rank's piece of it: the same object in the same groups, one-
dimensional, possibly empty, with a gradient alike. So any elementwise optimizer works unchanged, fused and foreach
kernels included, and keeps its state for the piece alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.sharding.collectives import Collectives
from smp_strategy.sharding.flat_buffer import FlatBuffer
from smp_strategy.sharding.layout import Entry, UnitLayout
from smp_strategy.sharding.messages import Pending

__all__ = ["FlatUnit"]


@final
class FlatUnit:
    """See the module docstring. From its construction on the parameters rest: they are without values.

    Args:
        parameters: those of the unit with their names; tied ones can come under several. In the same order on all
            ranks.
        collectives: those of the shard group.
        device: where the parameters are.
        persistence_threshold: parameters with fewer elements stay gathered from their first use to the optimizer's
            step.

    Attributes:
        layout: which elements of which parameter each rank has.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        collectives: Collectives,
        device: torch.device,
        *,
        persistence_threshold: int = 0,
    ) -> None:
        members = _without_doubles(parameters)
        entries = {_entry(names, parameter): parameter for names, parameter in members}
        self.layout = UnitLayout.of(entries, collectives.size, persistence_threshold)
        with _untracked():
            self._buffers = [
                FlatBuffer(flat, [entries[slot.entry] for slot in flat.slots], collectives, device)
                for flat in self.layout.flats
            ]

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters that this rank holds now."""
        return sum(buffer.held_bytes for buffer in self._buffers)

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's share of the gradients: what is to be added up over replicas, in place."""
        self.wait_reduced()
        return [buffer.gradients for buffer in self._buffers if buffer.gradients is not None]

    @property
    def is_used(self) -> list[bool]:
        """For each parameter, in the order of the layout, whether this rank has had a gradient of it since gradients
        were dropped."""
        return [is_used for buffer in self._buffers for is_used in buffer.is_used]

    @property
    def memory(self) -> list[range]:
        """The addresses of the parameters, while they are gathered."""
        return [buffer.memory for buffer in self._buffers]

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return any(buffer.has_gradients for buffer in self._buffers)

    def gather(self, *, anew: bool = False) -> None:
        """Begin to gather the values; does nothing while they are gathered. Collective.

        Args:
            anew: gather all the same what comes and goes, because other ranks may need it.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.gather(anew=anew)

    def wait(self) -> None:
        """Until the values that are being gathered are there, in the parameters."""
        with _untracked():
            for buffer in self._buffers:
                buffer.wait()

    def free(self) -> None:
        """Keep this rank's shards only, and what is small."""
        with _untracked():
            for buffer in self._buffers:
                buffer.free()

    def collect(self) -> None:
        """Take the gradients that the parameters have by now, and leave them without.

        Raises:
            UnsupportedError: a parameter was frozen when the unit was sharded, or its gradient is sparse.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.collect()

    def reduce(self, factor: float = 1.0) -> None:
        """Collect, and begin to add up the gradients over the group, to those of before. Collective.

        Args:
            factor: what this rank's gradients are multiplied by.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.reduce(factor)

    def wait_reduced(self) -> None:
        """Until the gradients that are being reduced are there."""
        with _untracked():
            for buffer in self._buffers:
                buffer.wait_reduced()

    def drop_gradients(self) -> None:
        """Begin anew with gradients."""
        with _untracked():
            for buffer in self._buffers:
                buffer.drop_gradients()

    @contextmanager
    def pieces_shown(self, is_used: Sequence[bool] | None = None) -> Iterator[None]:
        """Let every parameter, and its gradient, be this rank's piece of it.

        What happens to the values and gradients in this context stays. Afterwards the parameters rest.

        Args:
            is_used: for each parameter, whether any rank has used it; the others get no gradient. By default unused
                parameters have a gradient of zero.
        """
        flags = iter([True] * len(self.is_used) if is_used is None else is_used)
        with _untracked():
            for buffer in self._buffers:
                buffer.show_pieces([next(flags) for _ in buffer.is_used])
        try:
            yield
        finally:
            with _untracked():
                for buffer in self._buffers:
                    buffer.hide_pieces()

    def dissolve(self) -> None:
        """Give the parameters all of their values back, in memory of their own. Collective, and the end of the unit."""
        with _untracked():
            for buffer in self._buffers:
                buffer.dissolve()

    def take_gradients(self) -> tuple[list[Tensor], list[Pending]]:
        """Hand over this rank's share of the gradients; the unit has none afterwards.

        Returns:
            The share of each kind of parameters that are trained, zeros where there are none, and what must be over
            before it is complete.
        """
        with _untracked():
            found = [buffer.take_gradients() for buffer in self._trained]
        return [shard for shard, _ in found], [reducing for _, reducing in found if reducing is not None]

    def put_gradients(self, shards: Iterable[Tensor]) -> None:
        """Let the unit have the gradients that were taken, and nothing else."""
        for buffer, shard in zip(self._trained, shards, strict=True):
            assert buffer.gradients is None, "gradients have come that nobody has taken"
            buffer.gradients = shard

    @property
    def _trained(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._buffers if buffer.layout.is_trained]


@contextmanager
def _untracked() -> Iterator[None]:
    """Buffers are ordinary tensors, also where they are first used in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _without_doubles(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    found: dict[int, tuple[tuple[str, ...], nn.Parameter]] = {}
    for name, parameter in parameters:
        names, _ = found.get(id(parameter), ((), parameter))
        found[id(parameter)] = (*names, name), parameter
    return list(found.values())


def _entry(names: tuple[str, ...], parameter: nn.Parameter) -> Entry:
    return Entry(
        names=names,
        shape=tuple(parameter.shape),
        # As they are in memory, less the gaps.
        stride=torch.empty_like(parameter, device="meta").stride(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.itemsize,
        requires_grad=parameter.requires_grad,
    )
