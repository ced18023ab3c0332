"""Fake call: run a unit on fake tensors, without memory, arithmetic or lasting effects.

Nothing that the dry run does may reach the original: arguments and the tensors of a unit are replaced by fake ones,
objects that hold tensors are copied with fake tensors in them, and random generators are restored.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from smp_strategy.distributed.rng_state import capture, drawing_from, global_state
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.side_effects import is_object, watched
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["call", "frozen_rng", "imitate", "is_left_behind", "specs_inside", "stand_in", "tensors_of", "tracked"]


class _Fresh(torch.autograd.Function):
    """Makes a tensor that is no leaf and no view, like the output of an operation: it can be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def imitate(spec: TensorSpec, *, leaf: bool = False) -> Tensor:
    """Make a fake tensor with the metadata of ``spec``; call it inside a FakeTensorMode."""

    def make() -> Tensor:
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=spec.device)

    if not spec.requires_grad:
        return make()
    with torch.enable_grad():
        if leaf:
            return make().requires_grad_()
        return _Fresh.apply(torch.empty((), requires_grad=True), make)  # type: ignore[no-untyped-call]


def stand_in(
    leaf: Any,
    make: Callable[[TensorSpec], Tensor] = imitate,
    *,
    inside: Callable[[TensorSpec], Tensor] | None = None,
) -> Any:
    """Replacement of an argument in a dry run, independent of the original.

    Args:
        leaf: The argument; a tensor is given by its metadata.
        make: Makes the tensors.
        inside: Makes those that an object holds, if ``make`` does not.
    """
    if isinstance(leaf, TensorSpec):
        return make(leaf)
    if not is_object(leaf):
        return leaf
    with _CopyWith(inside or make):
        return copy.deepcopy(leaf)


def specs_inside(leaf: Any) -> list[TensorSpec]:
    """Metadata of the tensors that an object among the arguments holds, in the order of :func:`stand_in`."""
    found: list[TensorSpec] = []

    def note(spec: TensorSpec) -> Tensor:
        found.append(spec)
        return torch.empty(0)

    if is_object(leaf):
        stand_in(leaf, note)
    return found


def is_left_behind(leaf: Any) -> bool:
    """Whether ``leaf`` is a fake tensor that has outlived its dry run."""
    return isinstance(leaf, FakeTensor)


class _CopyWith(TorchFunctionMode):
    """Makes ``copy.deepcopy`` replace the tensors in an object (a key/value cache, say)."""

    def __init__(self, make: Callable[[TensorSpec], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self._make(TensorSpec.of(args[0]))
        return func(*args, **(kwargs or {}))


def call(callee: Callee, stand_ins: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Call ``callee`` with the tensors of its unit replaced by ``stand_ins``, by name."""
    if callee.module is None:
        return callee.function(*args, **kwargs)
    shim = _Shim(callee.module, watched(callee.function))
    return torch.func.functional_call(shim, {f"unit.{name}": t for name, t in stand_ins.items()}, args, kwargs)


class _Shim(nn.Module):
    """Calls the unit's ``forward`` without the hooks on the unit: those belong to the glue and run there."""

    def __init__(self, unit: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.unit = unit
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def tensors_of(module: nn.Module | None) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def frozen_rng() -> Iterator[Callable[[], bool]]:
    """Restore the generators of the host afterwards; yields whether Python's or numpy's have moved."""

    state = global_state()
    with drawing_from(state):
        yield lambda: capture([])[1:] != state[1:]


@contextmanager
def tracked() -> Iterator[None]:
    """Leave inference mode, in which tensors have no version counters; gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
