"""Random numbers that differ between ranks inside a split region, and are the same outside.

Where activations are whole, dropout must be the same on all ranks; where they are split, each rank has other elements,
which must not be dropped in the same pattern. So on entering a region a number is drawn from the ordinary generator,
which is in the same state on all ranks, the state is put aside, and the generator goes on from a seed that the number
and the rank make. On leaving the state comes back.

Nothing else is remembered. What brings back the state of the generator and computes again, as
``torch.utils.checkpoint`` does, draws the same numbers again.
"""

from typing import final

import torch
from torch import Tensor

from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["SplitRandomness"]


@final
class SplitRandomness:
    """Of a split region; all layers at its ends share one.

    Args:
        group: the ranks whose numbers differ.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._outside: tuple[torch.Generator, Tensor] | None = None

    def enter(self, x: Tensor) -> None:
        """From now on draw numbers of this rank's own, for tensors on the device of ``x``."""
        if self._outside is not None or not self._group.sends(x):
            return
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        number = int(torch.randint(2**62, (), generator=generator, device=x.device))
        self._outside = generator, generator.get_state()
        generator.manual_seed((number + self._group.rank * 0x9E3779B97F4A7C15) % 2**63)

    def leave(self) -> None:
        """Go on as all ranks do."""
        if self._outside is not None:
            generator, state = self._outside
            self._outside = None
            generator.set_state(state)
