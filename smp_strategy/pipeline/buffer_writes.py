"""Buffers above the units that a step changes in place: microbatches must not change them in turns.

A running mean stands on every stage, and all microbatches share it, as in one process. Each changes it after the one
before. But a change in two operations, of which the second one waits for a value of another stage
(``self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)``), lets the next microbatch in between: its first operation would
come before the second one of this. Such a step is refused. Whole numbers are left alone: they count, in any order.
"""

from collections.abc import Sequence
from typing import final

from torch import nn

from smp_strategy.errors import UnsupportedError

__all__ = ["BufferWrites"]


@final
class BufferWrites:
    """See the module docstring. One object serves one step.

    Args:
        modules: those above the units.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        held = [(name, each) for module in modules for name, each in module._buffers.items() if each is not None]
        self._buffers = [(name, each) for name, each in held if each.is_floating_point() and not each.is_inference()]
        self._versions = [each._version for _, each in self._buffers]
        # Which microbatch has changed each of them last.
        self._last = [0] * len(self._buffers)

    def note(self, microbatch: int) -> None:
        """A turn of ``microbatch`` ends.

        Raises:
            UnsupportedError: it has changed a buffer that a later microbatch had changed already.
        """
        for index, (name, buffer) in enumerate(self._buffers):
            version = buffer._version
            if version == self._versions[index]:
                continue
            self._versions[index] = version
            if microbatch < self._last[index]:
                raise UnsupportedError(
                    f"The buffer `{name}` is changed in place more than once by microbatch {microbatch}, and by "
                    f"microbatch {self._last[index]} in between, while the first one waited for a value of another "
                    "stage. Compute the new value first and write it once (`lerp_` or `copy_` instead of `mul_` and "
                    "`add_`), or set `microbatches=1`."
                )
            self._last[index] = microbatch
