"""The program that runs now on a stage, if any.

One object per runtime answers this question for everything that intercepts calls: units, autograd Functions,
collectives of the user, and placed tensors of programs that have ended. Exactly one program of a stage runs at a time
(:mod:`smp_strategy.pipeline.coroutine`), so a plain attribute is enough.
"""

from typing import final

from smp_strategy.pipeline.placed_tensor import Interpreter

__all__ = ["CurrentProgram"]


@final
class CurrentProgram:
    """Holds the interpreter whose turn it is.

    Attributes:
        interpreter: of the running program; ``None`` between turns and outside of steps.
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
