"""Random numbers that differ between ranks inside a split region, and are the same outside.

Where activations are whole, dropout must be the same on all ranks; where they are split, each rank has other elements,
which must not be dropped in the same pattern. So on entering a region a number is drawn from the ordinary generator,
which is in the same state on all ranks, its state is put aside, and it goes on from a seed that the number and the rank
make. On leaving the state comes back.

Nothing else is remembered. What brings back the state of the generator and computes again, as
``torch.utils.checkpoint`` does, draws the same numbers again. It also stops before the end when it has what it needs,
so a region may be left by an exception, after which somebody else has put the state back or not. The generator itself
tells: it knows the seed that it began with.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import generator_of
from smp_strategy.model.rng import derive_seed
from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["RegionRng"]

_OFFSETS_OF_A_CALL = 4
"""By which generators of CUDA advance at least."""


@final
class _InRegion(NamedTuple):
    """That a region has been entered."""

    opener: object
    """The layer that did it."""
    generator: torch.Generator
    seed: int
    """With which the generator began there."""
    outside: Tensor
    """The generator's state before."""


@final
class RegionRng:
    """Of a split region; the layers at its ends share one.

    Args:
        group: the ranks whose numbers differ.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._inside: _InRegion | None = None

    def enter(self, x: Tensor, layer: object) -> None:
        """From now on draw numbers of this rank's own, unless that has begun already.

        Args:
            x: on the device for which they are drawn.
            layer: which the region begins with. Where several read one tensor, the first of them counts.
        """
        if not self._group.sends(x):
            return
        if self._inside is not None:
            if self._inside.opener is not layer:
                return
            self.leave()  # what should have done it was not reached
        generator = generator_of(x.device)
        seed = derive_seed(*_drawn(generator), self._group.rank)
        self._inside = _InRegion(layer, generator, seed, generator.get_state())
        generator.manual_seed(seed)
        if torch._C._current_graph_task_id() != -1:
            # Computed again in a backward, which stops before the end of a region when it has what it needs.
            torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    def leave(self) -> None:
        """Draw what all ranks draw."""
        inside, self._inside = self._inside, None
        if inside is not None and inside.generator.initial_seed() == inside.seed:
            inside.generator.set_state(inside.outside)


def _drawn(generator: torch.Generator) -> tuple[int, ...]:
    """Numbers that come once; the generator goes on."""
    if generator.device.type == "cuda":
        # A draw would wait for the device.
        offset = generator.get_offset()
        generator.set_offset(offset + _OFFSETS_OF_A_CALL)
        return generator.initial_seed(), offset
    return (int(torch.randint(2**62, (), generator=generator)),)
