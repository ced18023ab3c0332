"""Random numbers in split regions: different on each rank inside, the same on all ranks outside.

Outside, activations are whole and dropout must be the same on all ranks; inside, each rank has other elements, which
must not be dropped in the same pattern. So on entering a region a number is drawn from the ordinary generator, which
has the same state on all ranks; its state is saved, and it is seeded from that number and the rank. On leaving the
state is restored.

Nothing else is stored. Code that restores the generator and recomputes, such as ``torch.utils.checkpoint``, draws the
same numbers again. It also stops early, once it has what it needs, so a region may be left by an exception, with or
without the generator's state restored. The generator itself tells: it knows the seed that it began with.
"""

from typing import NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import generator_of
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.distributed.torch_private import after_backward, is_in_backward
from smp_strategy.model.rng import derive_seed

__all__ = ["RegionRng"]

_OFFSETS_OF_A_CALL = 4
"""Minimum advance of a CUDA generator per call."""


@final
class _InRegion(NamedTuple):
    """State of an entered region."""

    opener: object
    """Layer that has entered it."""
    generator: torch.Generator
    seed: int
    """Seed of the generator inside."""
    outside: Tensor
    """State of the generator before."""


@final
class RegionRng:
    """Random numbers of a split region; shared by the layers at its ends."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._inside: _InRegion | None = None

    def enter(self, x: Tensor, layer: object) -> None:
        """Draw this rank's own numbers from now on, unless that has begun already.

        Args:
            x: Tensor on the device of the generator.
            layer: First layer of the region. If several read one tensor, the first of them counts.
        """
        if not self._group.sends(x):
            return
        if self._inside is not None:
            if self._inside.opener is not layer:
                return
            self.leave()  # the end of the last region was not reached
        generator = generator_of(x.device)
        seed = derive_seed(*_drawn(generator), self._group.rank)
        self._inside = _InRegion(layer, generator, seed, generator.get_state())
        generator.manual_seed(seed)
        if is_in_backward():
            # A recomputation, which may stop before the end of the region.
            after_backward(self.leave)

    def leave(self) -> None:
        """Return to the random numbers that all ranks draw."""
        inside, self._inside = self._inside, None
        if inside is not None and inside.generator.initial_seed() == inside.seed:
            inside.generator.set_state(inside.outside)


def _drawn(generator: torch.Generator) -> tuple[int, ...]:
    """Numbers that occur only once; advances the generator."""
    if generator.device.type == "cuda":
        # A draw would wait for the device.
        offset = generator.get_offset()
        generator.set_offset(offset + _OFFSETS_OF_A_CALL)
        return generator.initial_seed(), offset
    return (int(torch.randint(2**62, (), generator=generator)),)
