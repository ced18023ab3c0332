"""``torch.func`` transforms inside of units, under saved-tensor hooks.

PyTorch refuses ``torch.func.grad`` and its like where such hooks are set. Hooks that only observe are removed while a
transform runs. Where tensors saved inside would be lost, the user gets an error with a remedy.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd import graph

from smp_strategy.distributed.torch_private import outer_saved_tensor_hooks
from smp_strategy.errors import UnsupportedError

__all__ = ["stepping_aside", "without_transforms"]


@contextmanager
def without_transforms(unit: str, why: str, remedy: str) -> Iterator[None]:
    """Replace PyTorch's error for a transform in here by one with an explanation.

    Args:
        unit: Name of the running unit.
        why: Reason for the hooks; follows "a unit" in the sentence.
        remedy: A sentence.

    Raises:
        UnsupportedError: A transform was called.
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
    """Set ``hooks`` in here, except while a transform runs."""
    disabled = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled_without_ours(message: str) -> Iterator[None]:
        top = outer_saved_tensor_hooks()
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

    # torch looks this function up whenever a transform begins.
    vars(graph)["disable_saved_tensors_hooks"] = disabled_without_ours
    try:
        with hooks:
            yield
    finally:
        vars(graph)["disable_saved_tensors_hooks"] = disabled
