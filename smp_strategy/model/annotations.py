"""Notes that the user leaves on modules while a model is built: a stage, whether to split it.

A note is an attribute of the module, so copies keep it. It is left on a module and everything that it holds now, or on
every module that is created in a context. What is noted later replaces what was noted before, so contexts may be
nested: the innermost wins.

Stages that the user gives to modules by hand.

Nothing is known of units or stages while a model is built, so a stage is only noted: as an attribute of the module.
There are two ways to do so, with the names that SageMaker gives them::

    smp_strategy.set_partition(model.head, 1)      # a module and everything in it now

    with smp_strategy.partition(0):                # every module that is created in here
        self.encoder = Encoder()

The later note replaces the earlier one, so contexts may be nested and single layers placed after the whole. A module
without a note follows the one that holds it. Copies of a module keep its note. What becomes of the notes is decided
when the pipeline is set up (:mod:`smp_strategy.engine.given_partition`).
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, final

from torch import nn

from smp_strategy.errors import ConfigError
from smp_strategy.model.units import has_state

__all__ = ["ModuleNotes", "partition", "placed_modules", "set_partition"]

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


_STAGES = ModuleNotes[int]("_smp_stage")

Module = TypeVar("Module", bound=nn.Module)


def set_partition(module: Module, stage: int) -> Module:
    """Place ``module``, and everything that it holds now, on a pipeline stage; returns ``module``.

    It takes effect with ``auto_partition=False``. What is placed later wins, whichever way.

    Raises:
        ConfigError: ``stage`` is no stage number, or the module has no parameters and so runs where its input is.
    """
    _check(stage)
    if not has_state(module):
        raise ConfigError(
            f"`set_partition` got a {type(module).__name__} without parameters. Such a module runs on the stage "
            "where its input is. Place a module that has parameters, once its layers exist."
        )
    _STAGES.leave_on(module, stage)
    return module


def partition(stage: int) -> AbstractContextManager[None]:
    """Place all modules that are created inside on a pipeline stage, wherever and whenever they are registered.

    Contexts may be nested: the innermost wins. It takes effect with ``auto_partition=False``.

    Raises:
        ConfigError: ``stage`` is no stage number.
    """
    _check(stage)
    return _STAGES.on_new(stage)


def placed_modules(root: nn.Module) -> dict[str, int]:
    """Noted stages of modules in ``root``, under every name that they have there."""
    noted = ((name, _STAGES.of(module)) for name, module in root.named_modules(remove_duplicate=False))
    return {name: stage for name, stage in noted if stage is not None}


def _check(stage: object) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise ConfigError(f"A stage must be a whole number from 0 on, but is {stage!r}.")
