"""User annotations on modules: pipeline stage (manual partition), tensor-parallel choice.

An annotation is an attribute of the module, so copies keep it. Units and stages do not exist yet while a model is
built. A stage is annotated in two ways, with the names that SageMaker gives them::

    smp_strategy.set_partition(model.head, 1)      # a module and everything in it now

    with smp_strategy.partition(0):                # every module that is created in here
        self.encoder = Encoder()

A later annotation replaces an earlier one, so contexts may be nested (the innermost wins) and single layers placed
after the whole. A module without one follows the module that holds it. The setup of the pipeline evaluates them
(:mod:`smp_strategy.engine.given_partition`).
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
    """Annotations of one kind, such as stages.

    Args:
        attribute: Name of the module attribute that holds the annotation.
    """

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._watches = f"{attribute}_watches"
        # A context variable: threads and asynchronous tasks create modules independently.
        self._current: ContextVar[Note | None] = ContextVar(attribute, default=None)

    def of(self, module: nn.Module) -> Note | None:
        """Annotation on ``module`` itself."""
        return vars(module).get(self._attribute)

    def leave_on(self, module: nn.Module, note: Note) -> None:
        """Annotate ``module`` and everything that it holds now."""
        for part in module.modules():
            self.leave_on_alone(part, note)

    def leave_on_alone(self, module: nn.Module, note: Note) -> None:
        """Annotate ``module`` alone, without its submodules."""
        vars(module)[self._attribute] = note

    @contextmanager
    def on_new(self, note: Note) -> Iterator[None]:
        """Annotate all modules that are created inside."""
        self._watch_creation()
        before = self._current.set(note)
        try:
            yield
        finally:
            self._current.reset(before)

    def _watch_creation(self) -> None:
        """Wrap ``nn.Module.__init__`` so that every new module takes the annotation of its context.

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

    It takes effect with ``auto_partition=False``. A later placement wins, in either way.

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
    """Annotated stages of modules in ``root``, under every name that they have there."""
    noted = ((name, _STAGES.of(module)) for name, module in root.named_modules(remove_duplicate=False))
    return {name: stage for name, stage in noted if stage is not None}


def _check(stage: object) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise ConfigError(f"A stage must be a whole number from 0 on, but is {stage!r}.")
