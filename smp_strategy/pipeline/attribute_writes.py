"""Which attributes of modules does code write to, and what?

Code above the units may switch attributes of any of thousands of modules inside of them (``block.adapt = False``,
``model.eval()``). To compare all of them at every pause would take as long as a small step, so their writing is
watched: it is rare, and there is one function that does it.
"""

from collections.abc import Callable
from typing import Any, final

from torch import nn

__all__ = ["WatchedWrites"]

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
