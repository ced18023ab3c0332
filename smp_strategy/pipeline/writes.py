"""Which attributes of modules does code write to, and what?

Code above the units may switch attributes of any of thousands of modules inside of them (``block.adapt = False``,
``model.eval()``). To compare all of them at every pause would take as long as a small step, so their writing is
watched: it is rare, and there is one function that does it.

Buffers above the units that a step changes in place: microbatches must not change them in turns.

A running mean stands on every stage, and all microbatches share it, as in one process. Each changes it after the one
before. But a change in two operations, of which the second one waits for a value of another stage
(``self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)``), lets the next microbatch in between: its first operation would
come before the second one of this. Such a step is refused. Whole numbers are left alone: they count, in any order.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn

from smp_strategy.errors import UnsupportedError

__all__ = ["BufferWrites", "WatchedWrites"]

_METHODS = ("__setattr__", "__delattr__")


@final
class WatchedWrites:
    """From now on, until it is closed, ``note(module, name, values)`` is called before an attribute is set or deleted.

    ``values`` holds what it is set to, or nothing; what is returned is set instead.
    """

    def __init__(self, note: Callable[[nn.Module, str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
        # Empty: nothing is noted any more, where somebody else has wrapped the methods since.
        self._note = [note]
        self._before = {name: vars(nn.Module)[name] for name in _METHODS}
        self._instead = {name: self._watched(method) for name, method in self._before.items()}
        for name, method in self._instead.items():
            type.__setattr__(nn.Module, name, method)

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        notes = self._note

        def write(module: nn.Module, name: str, *values: Any) -> None:
            for note in notes:
                values = note(module, name, values)
            method(module, name, *values)

        return write

    def close(self) -> None:
        """Watch no longer."""
        self._note.clear()
        for name, method in self._instead.items():
            if vars(nn.Module)[name] is method:
                type.__setattr__(nn.Module, name, self._before[name])


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
