"""Notes that the user leaves on modules while a model is built: a stage, whether to split it.

A note is an attribute of the module, so copies keep it. It is left on a module and everything that it holds now, or on
every module that is created in a context. What is noted later replaces what was noted before, so contexts may be
nested: the innermost wins.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, final

from torch import nn

__all__ = ["ModuleNotes"]

Note = TypeVar("Note")


@final
class ModuleNotes(Generic[Note]):
    """Notes about one subject.

    Args:
        attribute: of modules that have a note.
    """

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._watches = f"{attribute}_watches"
        # For modules that are being created, per thread and per asynchronous task.
        self._current: ContextVar[Note | None] = ContextVar(attribute, default=None)

    def of(self, module: nn.Module) -> Note | None:
        """The note on ``module`` itself."""
        return vars(module).get(self._attribute)

    def leave_on(self, module: nn.Module, note: Note) -> None:
        """Leave ``note`` on ``module`` and everything that it holds now."""
        for part in module.modules():
            self.leave_on_alone(part, note)

    def leave_on_alone(self, module: nn.Module, note: Note) -> None:
        """Leave ``note`` on ``module``, and on nothing that it holds."""
        vars(module)[self._attribute] = note

    @contextmanager
    def on_new(self, note: Note) -> Iterator[None]:
        """Leave ``note`` on all modules that are created inside."""
        self._watch_creation()
        before = self._current.set(note)
        try:
            yield
        finally:
            self._current.reset(before)

    def _watch_creation(self) -> None:
        """Have every new module ask for the note of the context that it is created in.

        Classes of all kinds have only ``nn.Module.__init__`` in common. It stays wrapped: threads may leave their
        contexts in any order, and outside of a context the wrapper does nothing.
        """
        original, notes = nn.Module.__init__, self
        if getattr(original, self._watches, False):
            return

        @functools.wraps(original)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            note = notes._current.get()
            if note is not None:
                vars(self)[notes._attribute] = note

        setattr(init, self._watches, True)
        nn.Module.__init__ = init  # type: ignore[method-assign]
