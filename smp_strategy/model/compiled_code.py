"""Functions that PyTorch's compiler must leave alone.

A module may have parts that the user has compiled (``torch.compile(block)``). While compiled code runs, Dynamo also
compiles Python functions that are called from it, such as hooks for saved tensors. Those of this package look at
addresses and communicate, which cannot be compiled.
"""

import sys
from functools import cache
from types import CodeType, FunctionType, MethodType

__all__ = ["leave_uncompiled"]


def leave_uncompiled(*functions: object) -> None:
    """Keep Dynamo from compiling Python ``functions``, and what these call."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; its import takes a second
        return
    for function in functions:
        inner = function.__func__ if isinstance(function, MethodType) else function
        if isinstance(inner, FunctionType):
            _leave(inner.__code__)


@cache  # closures of one function have the same code
def _leave(code: CodeType) -> None:
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
