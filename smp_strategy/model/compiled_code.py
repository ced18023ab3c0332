"""Code that PyTorch's compiler must leave alone.

A module may have parts that the user has compiled (``torch.compile(block)``). While compiled code runs, Dynamo also
compiles Python functions that are called from it, such as hooks for saved tensors. Those of this package look at
addresses and communicate, which cannot be compiled.

Functions that the user has compiled and calls above the units (a loss, say) compute with placed tensors, which have
no values on most stages. They run uncompiled, operation by operation.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any, final

__all__ = ["leave_uncompiled", "uncompiled_where"]


def leave_uncompiled(*functions: object) -> None:
    """Keep Dynamo from compiling Python ``functions``, and what these call."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; its import takes a second
        return
    for function in functions:
        inner = function.__func__ if isinstance(function, MethodType) else function
        if isinstance(inner, FunctionType):
            _leave(inner.__code__)


@contextmanager
def uncompiled_where(is_glue: Callable[[], bool]) -> Iterator[None]:
    """Context in which compiled functions that the code above the units calls run uncompiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo import eval_frame

    before = eval_frame._stance
    eval_frame._stance = _EagerStance(is_glue, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        eval_frame._stance = before


@final
class _EagerStance:
    """Stance of the compiler as of ``torch.compiler.set_stance``: ``force_eager`` wherever ``is_glue``.

    The function itself would set the stance of the whole process, for compiled units as well.
    """

    def __init__(self, is_glue: Callable[[], bool], otherwise: Any) -> None:
        self._is_glue = is_glue
        self._otherwise = otherwise

    @property
    def stance(self) -> str:
        found: str = "force_eager" if self._is_glue() else self._otherwise.stance
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._otherwise, name)


@cache  # closures of one function have the same code
def _leave(code: CodeType) -> None:
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
