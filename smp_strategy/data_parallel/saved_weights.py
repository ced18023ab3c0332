"""Saved-tensor hooks for weights of sharded units: backward gathers the weights before it reads them.

Autograd saves views of weights, and their memory comes and goes. The code that frees it must know when backward will
read it, and can be mistaken: a unit may leave a result in an attribute, or in an object that cannot be inspected. Freed
memory must never be read. So tensors that a unit saves pass through here: those in the memory of its weights are handed
to autograd in a form that asks for the weights when it is opened.

This replaces autograd's own check that a saved tensor was not changed in place, which is done only for tensors that
were saved without hooks. Hooks of the user or of a checkpoint that are set inside the unit are nearer and come before
these; hooks outside of it get all tensors except the weights, as they would without these.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smp_strategy.distributed.torch_private import outer_saved_tensor_hooks
from smp_strategy.errors import changed_in_place
from smp_strategy.model.compiled_code import leave_uncompiled

__all__ = ["is_in", "weights_guarded"]

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_Saved = tuple[Any, int, Literal["weight", "own", "outer"]]


def weights_guarded(memory: Sequence[range], needed: Callable[[], None]) -> saved_tensors_hooks:
    """Context in which saved tensors in ``memory`` are read only after a call of ``needed``.

    Args:
        memory: Address ranges of the weights.
        needed: Makes sure that the weights are there; called before each read.
    """
    outer: _Hooks | None = outer_saved_tensor_hooks()

    def save(tensor: Tensor) -> _Saved:
        if is_in(memory, tensor):
            return tensor, tensor._version, "weight"
        if outer is not None:
            return outer[0](tensor), 0, "outer"
        # A result must not hold the node that holds it.
        return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version, "own"

    def read(saved: _Saved) -> Tensor:
        content, version, kind = saved
        if kind == "outer":
            assert outer is not None
            return outer[1](content)
        if kind == "weight":
            needed()
        if content._version != version:
            raise changed_in_place(content.shape, content._version, version)
        return content

    leave_uncompiled(save, read)
    return saved_tensors_hooks(save, read)


def is_in(memory: Sequence[range], tensor: Tensor) -> bool:
    """Whether ``tensor`` stands in ``memory``."""
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse, or of another kind without plain memory
        return False
    # Called for each tensor that is saved, and `any` takes longer.
    for addresses in memory:  # noqa: SIM110
        if address in addresses:
            return True
    return False
