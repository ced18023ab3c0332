"""Tables of operations on placed tensors (reads of values, refused ones with their remedies, special ones); names."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.pipeline.segments import start_of_gradient
from smp_strategy.pipeline.wrapping.inner_gradients import gradients_in_step

__all__ = ["ANSWERED", "READS", "READ_NAMES", "REFUSED", "calling_line", "is_in_place", "operation_name"]

READ_NAMES = (
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
    *("__repr__", "__format__", "__contains__", "equal", "allclose", "is_nonzero"),
)
READS: frozenset[Any] = frozenset(
    {*(getattr(Tensor, name) for name in READ_NAMES), torch.equal, torch.allclose, torch.is_nonzero}
)
# They begin like `__iadd__`.
_NO_CHANGES = ("__iter__", "__index__", "__invert__", "__int__")


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


_BACKWARD = (
    "Return the loss from the step; in manual optimization call `self.manual_backward(loss)`. For gradients "
    "that the step goes on with (Langevin dynamics, an inner loop), put the loop into the `forward` of a module that "
    "is a unit (`smp_strategy.unit(module)`), or make the module that is differentiated one and call "
    "`torch.autograd.grad(loss, inputs)`. A probe that is trained beside the model takes the values of its features on "
    "all ranks, after the step: `torch.from_numpy(features.detach().cpu().numpy())`."
)

REFUSED: dict[Any, str] = {
    Tensor.backward: _BACKWARD,
    Tensor.retain_grad: "Gradients of activations stay on the stage that computes them.",
    Tensor.data_ptr: "A placed tensor has memory on one stage only.",
    Tensor.share_memory_: "A placed tensor has memory on one stage only.",
    Tensor.untyped_storage: "A placed tensor has memory on one stage only.",
    Tensor.__reduce_ex__: "It cannot be pickled. Return it from the step and save what the step returned.",
    Tensor.resize_: "Make a new tensor instead.",
    Tensor.set_: "Make a new tensor instead.",
    _setter("data"): "Use an operation that returns a new tensor.",
    _setter("grad"): "Gradients of activations stay on the stage that computes them.",
    torch.autograd.backward: _BACKWARD,
}


def _begin_gradient(program: Any, tensor: Any, requires_grad: bool = True) -> Any:
    """``requires_grad_``: start a graph at this tensor, whose history requires no gradient."""
    if requires_grad == tensor.spec.requires_grad:
        return tensor
    if not requires_grad:
        raise RuntimeError("`requires_grad_(False)` of a tensor that was computed, in PyTorch as here: use `detach`.")
    begun = program.operation("requires_grad_", start_of_gradient, (tensor,), {})
    with plain_functions():
        tensor.requires_grad_()
    tensor.value, tensor.spec, tensor.born = begun.value, begun.spec, begun.born
    tensor.origin, tensor.current = begun.origin, begun.current
    return tensor


ANSWERED: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: lambda program, *args, **kwargs: program.hook_gradient(*args, **kwargs),
    Tensor.requires_grad_: _begin_gradient,
    _setter("requires_grad"): _begin_gradient,
    torch.autograd.grad: gradients_in_step,
}
"""Operations that are carried out in a way of their own, by a function of the program and the arguments."""


def operation_name(func: Callable[..., Any]) -> str:
    """Name of an operation as users write it."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a property of Tensor, such as `T` or `data`
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def is_in_place(name: str) -> bool:
    """Whether an operation with this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_CHANGES)
    return name.endswith("_")


def calling_line() -> str:
    """The first line outside torch and this package, for error messages."""
    for frame in inspect.stack(context=0)[1:]:
        module = str(frame.frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in ("torch", "smp_strategy"):
            return f" (in {frame.filename}, line {frame.lineno})"
    return ""
