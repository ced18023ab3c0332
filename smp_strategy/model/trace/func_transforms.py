"""Units that call `torch.func.grad` and its like, under hooks on saved tensors.

PyTorch does not allow these transforms where such hooks are set. Hooks that only look on can be taken off for as long
as a transform runs; where what is saved inside would be lost, the user is told what to do instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import graph

from smp_strategy.errors import UnsupportedError

__all__ = ["stepping_aside", "without_transforms"]


@contextmanager
def without_transforms(unit: str, why: str, remedy: str) -> Iterator[None]:
    """Explains the error that PyTorch raises for a transform in here.

    Args:
        unit: whose code runs.
        why: there are hooks; follows "a unit".
        remedy: a sentence.

    Raises:
        UnsupportedError: there was one.
    """
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise UnsupportedError(
            f"{unit} is a unit {why}, which takes hooks on saved tensors, and PyTorch does not allow them around "
            f"`torch.func.grad`, `vjp`, `jacrev` or `hessian`. {remedy}"
        ) from error


@contextmanager
def stepping_aside(hooks: graph.saved_tensors_hooks) -> Iterator[None]:
    """``hooks`` are set in here, except while a transform runs."""
    disabled = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled_without_ours(message: str) -> Iterator[None]:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] is not hooks.pack_hook:
            with disabled(message):
                yield
            return
        hooks.__exit__()
        try:
            with disabled(message):
                yield
        finally:
            hooks.__enter__()

    # Looked up in torch whenever a transform begins.
    vars(graph)["disable_saved_tensors_hooks"] = disabled_without_ours
    try:
        with hooks:
            yield
    finally:
        vars(graph)["disable_saved_tensors_hooks"] = disabled
