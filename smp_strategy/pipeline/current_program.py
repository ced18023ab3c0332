"""Holder of the running program of a stage, if any.

One object per runtime serves everything that intercepts calls: units, autograd Functions, collectives of the user, and
placed tensors of programs that have ended. At most one program of a stage runs at a time
(:mod:`smp_strategy.pipeline.coroutine`), so a plain attribute is enough.
"""

import functools
from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor

__all__ = ["CurrentProgram"]


@final
class CurrentProgram:
    """Holds the interpreter whose turn it is.

    Attributes:
        interpreter: interpreter of the running program; ``None`` between turns and outside of steps.
    """

    def __init__(self) -> None:
        self.interpreter: Interpreter | None = None

    def enter(self, interpreter: Interpreter | None) -> None:
        """Begin the turn of ``interpreter``; ``None`` ends a turn."""
        if self.interpreter is not None:
            self.interpreter.cached.leave()
        self.interpreter = interpreter
        if interpreter is not None:
            interpreter.cached.enter()

    @property
    def is_in_step(self) -> bool:
        """Whether a program runs: the caller is code of a step, or of a hook that sees gradients."""
        return self.interpreter is not None

    @property
    def running_unit(self) -> nn.Module | None:
        """The unit whose code is running, if any."""
        return None if self.interpreter is None else self.interpreter.enclosing

    def call_with_values(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, unknown: Callable[[], Any]
    ) -> Any:
        """See :meth:`smp_strategy.engine.engine.Engine.call_with_values`."""
        program = self.interpreter
        if program is None or not any(isinstance(leaf, PlacedTensor) for leaf in flatten((args, kwargs))[0]):
            return function(*args, **kwargs)
        if program.is_dry_run:
            return unknown()
        name = getattr(function, "__qualname__", repr(function))
        return program.read(name, functools.partial(_call_detached, function), args, kwargs)


def _call_detached(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with values whose history ends here: it is on one stage, and none of it on the others."""
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    return function(*args, **kwargs)
