"""Detection of writes to modules in a step: attribute assignments, and in-place changes of buffers above the units.

Attributes: code above the units may switch attributes of any of thousands of modules inside of them (``block.adapt =
False``, ``model.eval()``). Comparing all of them at every pause would take as long as a small step, so the one function
that sets attributes is watched; writes are rare.

Buffers: a running mean exists on every stage, and all microbatches share it, as in a single process; each changes it
after the previous one. But a change in two operations, of which the second waits for a value of another stage
(``self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)``), lets the next microbatch run its first operation in between. Such
a step is refused. Integer buffers are exempt: they count, in any order.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["BufferWrites", "WatchedWrites"]

_METHODS = ("__setattr__", "__delattr__")


@final
class WatchedWrites:
    """Watches attributes of all modules until it is closed: calls ``written`` before the glue of a program sets or
    deletes one.
    """

    def __init__(self, written: Callable[[nn.Module, str], None], current: CurrentProgram) -> None:
        def note(module: nn.Module, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
            """Take the new value, or nothing for a deletion; return what is to be set instead."""
            program = current.interpreter
            if program is None or program.is_in_unit:
                return values
            written(module, name)
            is_placed = len(values) == 1 and isinstance(values[0], PlacedTensor) and not values[0].requires_grad
            if is_placed and name in vars(module).get("_buffers", ()):
                # Buffers outlive the step, and every stage must have the same ones: they get the real value.
                return (program.read(f"the buffer `{name}`", Tensor.clone, values, {}),)
            return values

        # A list that `close` empties: the wrapper stays in place if other code has wrapped the methods since.
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
        self._note.clear()
        for name, method in self._instead.items():
            if vars(nn.Module)[name] is method:
                type.__setattr__(nn.Module, name, self._before[name])


@final
class BufferWrites:
    """Detects interleaved in-place changes of buffers; one object serves one step."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        held = [(name, each) for module in modules for name, each in module._buffers.items() if each is not None]
        self._buffers = [(name, each) for name, each in held if each.is_floating_point() and not each.is_inference()]
        self._versions = [each._version for _, each in self._buffers]
        # The microbatch that has changed each of them last.
        self._last = [0] * len(self._buffers)

    def note(self, microbatch: int) -> None:
        """Note the buffers that ``microbatch`` has changed; call it at the end of each turn.

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
