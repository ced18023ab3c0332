"""Placed tensor: a tensor subclass whose values live on one pipeline stage; other stages know its metadata only.

Every stage runs the user's whole program. A unit returns :class:`PlacedTensor` objects on all stages; only the stage
that ran the unit has the values. Operations on placed tensors arrive here (``__torch_function__``) before PyTorch sees
them, and fall into four kinds:

* queries of metadata are answered from the metadata;
* reads of values by Python code make the owner send the value to every stage, so that all take the same branch;
* other operations run on one stage (see :mod:`smp_strategy.pipeline.routing`) and are predicted on the others;
* operations that cannot be routed are refused by name.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Value
from smp_strategy.model.trace.parametrize_cache import CachedWeights
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import flatten_call
from smp_strategy.model.trace.tensor_spec import METADATA, TensorSpec
from smp_strategy.pipeline.placed_ops import ANSWERED, READS, REFUSED, calling_line, operation_name
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.shared_tensors.tensor_memory import TensorMemory

__all__ = ["Interpreter", "PlacedTensor", "program_of"]


class Interpreter(Protocol):
    """Interprets the program of one microbatch, call by call; placed tensors hand their operations to it."""

    microbatch: int
    closed: bool
    is_dry_run: bool
    is_predicting: bool
    """Whether it is running code on fake tensors."""
    enclosing: nn.Module | None
    """Running unit, for real or dry."""
    function: str
    """Name of the running autograd Function of the glue; empty without one."""
    asked: ActivationPolicy | None
    """Policy of the innermost open checkpoint of the glue, for units whose own recomputes nothing."""
    cached: CachedWeights
    """Parametrized weights that are kept for the microbatch."""
    weights: TorchFunctionMode | None
    """Mode of the glue that code of units does without, if there is one."""

    @property
    def is_in_unit(self) -> bool:
        """Whether code of a unit is running."""

    def unit(self, name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        """Call a unit."""

    def operation(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Apply an operation of the glue."""

    def read(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute ``function`` from real values, on every stage."""

    def hook_gradient(self, tensor: "PlacedTensor", hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call ``hook`` with the gradient of ``tensor``."""

    def lives_on(self, tensor: "PlacedTensor") -> int:
        """The stage that made ``tensor``."""

    def check_current(self, tensor: "PlacedTensor") -> None:
        """Refuse a tensor whose memory was changed through a view on another stage."""

    def bring(self, spec: TensorSpec, stages: Iterable[int], tensor: Tensor | None) -> "PlacedTensor":
        """Make a placed tensor of this program for a tensor that exists already on ``stages``."""


@final
class PlacedTensor(Tensor):
    """Tensor with values on one stage and metadata on all; made by an :class:`Interpreter` only.

    Attributes:
        program: interpreter of its microbatch.
        value: number and size of the value in the program trace.
        spec: metadata.
        origin: on stages that hold it, the segment in which it was made or received, and the real tensor there.
        current: the segment that used it last, and the real tensor of this segment.
        born: segment in which it was made or last changed.
        memory: memory shared with its views and detached tensors.
        version: version of the memory that it represents.
        is_weighted: whether a term of the loss with a weight has gone into it (``loss_weights``).
        maker: unit that has left it in an object among its arguments, if any (``carried_objects``).
        known: value on every stage, once code after the end of the program has asked for it.
        family: number in common with its views (autograd's base), but not with detached tensors.
        offset: elements from the beginning of the memory; ``None``: unknown.
        copy: equal for tensors whose real tensors share memory, too, if they are in one segment.
    """

    is_placed = True
    program: Interpreter
    value: Value
    spec: TensorSpec
    origin: tuple[int, Tensor] | None = None
    current: tuple[int, Tensor] | None = None
    born: SegmentId
    memory: TensorMemory
    version: int = 0
    family: int
    offset: int | None = 0
    copy: object = None
    is_weighted = False
    maker = ""
    known: Tensor | None = None

    @staticmethod
    def __new__(cls, program: Interpreter, value: Value, spec: TensorSpec, born: SegmentId) -> "PlacedTensor":
        made: PlacedTensor = Tensor._make_wrapper_subclass(
            cls,
            spec.size,
            strides=spec.stride,
            dtype=spec.dtype,
            device=spec.device,
            requires_grad=spec.requires_grad,
        )
        made.stand_for(program, value, spec, born)
        return made

    def stand_for(self, program: Interpreter, value: Value, spec: TensorSpec, born: SegmentId) -> None:
        """Begin to represent ``value``."""
        self.program = program
        self.value = value
        self.spec = spec
        self.born = born
        self.memory = TensorMemory()
        self.family = value.id

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """As for the real tensor: a placed tensor that requires a gradient was computed."""
        return not self.spec.requires_grad

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        """``None``: graphs consist of real tensors, and the placed one is part of none."""
        return

    @property
    def grad(self) -> None:  # type: ignore[override]
        """``None``: gradients of activations stay on the stage that computes them."""
        return

    def __copy__(self) -> Tensor:
        return self._without_history().detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = self._without_history().clone()
        return made

    def _without_history(self) -> "PlacedTensor":
        if self.spec.requires_grad:
            raise RuntimeError(
                "The `copy` module copies only tensors without a history, in PyTorch as here: use `detach` first, or "
                "`clone`."
            )
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1 and func not in ANSWERED and any(getattr(kind, "is_guarded", False) for kind in types):
            return NotImplemented  # weights of other stages route these operations themselves
        if func in METADATA:
            with plain_functions():
                return func(*args, **kwargs)
        if func in REFUSED:
            raise UnsupportedError(f"`{operation_name(func)}` of a placed tensor{calling_line()}: {REFUSED[func]}")
        program = program_of(args, kwargs)
        if program is None:
            args, kwargs = _in_plain_lists(args), dict(zip(kwargs, _in_plain_lists(kwargs.values()), strict=True))
            program = program_of(args, kwargs)
        if program is None:
            raise UnsupportedError(
                f"`{operation_name(func)}`{calling_line()} meets a placed tensor inside of an object. Give it as an "
                "argument: bare, or in a tuple, list, dict or dataclass."
            )
        if func in ANSWERED:
            return ANSWERED[func](program, *args, **kwargs)
        if func in READS:
            return program.read(operation_name(func), func, args, kwargs)
        return program.operation(operation_name(func), func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # PyTorch needs a number, as in `torch.arange(n)`
            return args[0].program.read("item", Tensor.item, args, {})
        raise UnsupportedError(
            f"A placed tensor reached `{func}`{calling_line()} by a way that cannot be routed between stages (a C++ "
            "extension, a transform of torch.func, or torch.tensor(...) of a tensor in code above the units). Move "
            "this code into an nn.Module that holds the parameters it works on, so that it runs inside a unit."
        )


def program_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Interpreter | None:
    """The program of a placed tensor among the arguments of a call, if there is one."""
    for leaf in args:
        if isinstance(leaf, PlacedTensor):
            return leaf.program
    leaves, _ = flatten_call(args, kwargs)
    return next((leaf.program for leaf in leaves if isinstance(leaf, PlacedTensor)), None)


def _in_plain_lists(values: Iterable[Any]) -> tuple[Any, ...]:
    """``values`` with list subclasses as plain lists: operators take any subclass, pytrees only registered classes."""
    return tuple(list(value) if isinstance(value, (list, tuple)) else value for value in values)
