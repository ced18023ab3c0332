"""Fake call: run a unit on fake tensors, without memory, arithmetic or lasting effects.

Nothing that the dry run does may reach the original: arguments and the tensors of a unit are replaced by fake ones,
objects that hold tensors are copied with fake tensors in them, and random generators are restored.

Dispatch mode of a dry run: counts kernels, notices random draws, answers value-dependent operations.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smp_strategy.distributed.rng_state import capture, drawing_from, global_state
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.flops import KernelTally
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.model.trace.side_effects import is_object, watched
from smp_strategy.model.trace.tensor_spec import TensorSpec, storage_of

__all__ = [
    "call",
    "fails_again",
    "frozen_rng",
    "imitate",
    "is_left_behind",
    "specs_inside",
    "stand_in",
    "tensors_of",
    "tracked",
    "until_exchanged",
    "Meter",
    "draws",
]

P = ParamSpec("P")
T = TypeVar("T")


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
        if func in (Tensor.__deepcopy__, Tensor.clone):  # the latter copies a placed tensor
            return self._make(TensorSpec.of(args[0]))
        return func(*args, **(kwargs or {}))


def call(callee: Callee, stand_ins: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Call ``callee`` with the tensors of its unit replaced by ``stand_ins``, by name."""
    if callee.module is None:
        return callee.function(*args, **kwargs)
    shim = _Shim(callee.module, watched(callee.function))
    return torch.func.functional_call(shim, {f"unit.{name}": t for name, t in stand_ins.items()}, args, kwargs)


def until_exchanged(run: Callable[P, T]) -> Callable[P, T]:
    """Decorator for a dry run: runs once more if PyTorch could not exchange a weight (``module.to(dtype)`` in a unit).

    It exchanges fake tensors only if there are no weak references to them, and keeps such references itself the first
    time.
    """

    @wraps(run)
    def runs(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("_apply(): Couldn't swap"):
                raise
        return run(*args, **kwargs)

    return runs


def fails_again(run: Callable[[], object], error: Exception) -> bool:
    """Whether ``error`` of the dry run ``run`` is one of its code; another dry run finds that out.

    A dry run depends on metadata alone, so an error of its code comes again, and on every rank. What a signal handler
    or another thread raises in the running code (``PyThreadState_SetAsyncExc``) and a lack of memory are errors of one
    rank. If this rank took them for a property of the code, it would wait for messages that no other rank sends.
    """
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return True
    if isinstance(error, MemoryError):
        return False
    try:
        run()
    except Exception as again:
        return type(again) is type(error)
    return False


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


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


# [Note: assumed values]
# The results of some operations depend on values: the number of non-zero entries, the number in a tensor. A dry run has
# no values. It then runs once per assumption, with every such count and number set to 1, to 3 and to 0. If the results
# of all these runs agree, the result does not depend on values: a mixture of experts returns tokens of the same shape
# however they were routed. If not, or if one run fails, the call is unpredictable, and its stage sends the real result.
# A run under an assumption counts as random: another branch may draw, or return an input instead of a new tensor.


class SharedTableError(UnsupportedError):
    """Use of a tensor of another unit that depends on no argument and no weight: this unit might make its own."""


class Meter(TorchDispatchMode):
    """Observes the operations of a dry run.

    Args:
        tally: Counts kernels, if there is one.
        assumed: Answer for numbers and counts that depend on values, see [Note: assumed values]; ``None``: fail.
        unit: Name of the running unit; it must not use tensors that another unit has left in an object.

    Attributes:
        random: Whether an operation has drawn random numbers.
        written: Storages that operations have written to (see
            :func:`~smp_strategy.model.trace.tensor_spec.storage_of`).
    """

    def __init__(self, tally: KernelTally | None, assumed: int | None = None, unit: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.written = set[int]()
        self._tally = tally
        self._assumed = assumed
        self._unit = unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # About two of three calls ask for the device of a tensor. Nothing is used or computed.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._unit is not None:
            self._refuse_foreign(args, kwargs)
        try:
            result = _grouped_mm(*args, **kwargs) if func is _aten._grouped_mm.default else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if self._assumed is None:
                raise
            result = _assume(func, args, self._assumed)
            if result is NotImplemented:
                raise
        self.written.update(map(storage_of, _written(func, args, kwargs)))
        is_random = draws(func, args, kwargs)
        if self._unit is not None:
            is_table = not is_random and all(map(_is_table, leaves_of((args, kwargs))))
            for tensor in leaves_of(result):
                if isinstance(tensor, FakeTensor):
                    tensor.made_by, tensor.is_table = self._unit, is_table  # type: ignore[attr-defined]
        if self._tally is not None:
            self._tally.note(func, args, kwargs, result, is_random=is_random)
        self.random |= is_random
        return result

    def _refuse_foreign(self, args: Any, kwargs: Any) -> None:
        for tensor in leaves_of((args, kwargs)):
            maker = getattr(tensor, "made_by", self._unit)
            if maker != self._unit:
                raise (SharedTableError if _is_table(tensor) else UnsupportedError)(
                    f"Unit `{self._unit}` uses a tensor that unit `{maker}` put into an object (a cache, say), but the "
                    "two may live on different stages. Return the tensor and give it as an argument, or use a list or "
                    "dict among the arguments."
                )


def _is_table(leaf: Any) -> bool:
    """Whether ``leaf`` depends on no argument and no weight: each stage that needs such a tensor can make its own."""
    return not isinstance(leaf, Tensor) or getattr(leaf, "is_table", not isinstance(leaf, FakeTensor))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the operation writes to."""
    if not func._schema.is_mutable:
        return []
    parameters = func._schema.arguments
    given = {**dict(zip([parameter.name for parameter in parameters], args, strict=False)), **kwargs}
    values = [given.get(each.name) for each in parameters if each.alias_info is not None and each.alias_info.is_write]
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    parameters = func._schema.arguments
    given = {**dict(zip([parameter.name for parameter in parameters], args, strict=False)), **kwargs}
    # Attention has the tag even without dropout.
    rates = [given.get("dropout_p", each.default_value) for each in parameters if each.name == "dropout_p"]
    return rates != [0.0]


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """Result shape of ``aten._grouped_mm``, whose fake kernel refuses float32, which the real one accepts."""
    if a.ndim == b.ndim == 2:  # groups along the dim that is summed over
        assert offs is not None
        return a.new_empty((len(offs), a.size(0), b.size(1)), dtype=out_dtype or a.dtype)
    groups = (a.size(0),) if a.ndim == b.ndim == 3 else ()
    return a.new_empty((*groups, a.size(-2), b.size(-1)), dtype=out_dtype or a.dtype)


def _assume(func: Any, args: Any, number: int) -> Any:
    """Result of ``func`` if every value it reads is ``number``; ``NotImplemented`` for other operations."""
    tensor = args[0]
    if func is _aten._local_scalar_dense.default:
        return _python_type(tensor.dtype)(number)
    if func is _aten.equal.default:
        return bool(number)
    if func is _aten.nonzero.default:
        return tensor.new_empty((number, tensor.ndim), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return tensor.new_empty((number,))
    if func is _aten.index.Tensor:
        return tensor[tuple(slice(None) if index is None else index for index in _without_masks(args[1], number))]
    return NotImplemented


def _python_type(dtype: torch.dtype) -> type:
    if dtype is torch.bool:
        return bool
    return complex if dtype.is_complex else float if dtype.is_floating_point else int


def _without_masks(indices: Any, number: int) -> list[Tensor | None]:
    """Replace each mask among ``indices`` by ``number`` positions per dim that it covers."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty((number,), dtype=torch.int64)] * index.ndim
        else:
            found.append(index)
    return found
