"""A tensor that lives on one pipeline stage and is known on the others by shape, dtype and device only.

Every stage runs the user's whole program. What a unit returns is a :class:`PlacedTensor` on all stages; only the
stage that ran the unit has the values. Operations on placed tensors come here before PyTorch sees them, and fall
into four kinds:

* questions about metadata are answered from the metadata;
* reads of values by Python code make the owner send the value to every stage, so that all take the same branch;
* other operations run on one stage (see :mod:`smp_strategy.pipeline.routing`) and are predicted on the others;
* what cannot be routed is refused with the name of the operation.
"""

import inspect
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Value
from smp_strategy.model.trace.metadata_ops import METADATA
from smp_strategy.model.trace.parametrize_cache import CachedWeights
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_ops import READS, REFUSED
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.segments import start_of_gradient

__all__ = ["Interpreter", "TensorMemory", "PlacedTensor", "number_of"]


@final
class TensorMemory:
    """What a tensor shares with its views. A change through one of them reaches them all, where they really share.

    Made for every placed tensor and rarely changed, so what it holds at first stands in the class.
    """

    is_plain: bool = False
    """Whether it is that of a tensor that exists on every stage."""
    version: int = 0
    """Number of changes in place."""
    changed: tuple[Value, SegmentId, int] | None = None
    """The last changed tensor, where that happened, and its :attr:`PlacedTensor.family`."""


class Interpreter(Protocol):
    """Runs the program of one microbatch, call by call; placed tensors hand it the operations that they meet."""

    microbatch: int
    """Its number in the step."""
    closed: bool
    """Whether the program has ended."""
    is_survey: bool
    """Whether it runs only to be looked at; there are no values then."""
    is_predicting: bool
    """Whether it runs code on fake tensors just now."""
    enclosing: nn.Module | None
    """The unit that runs just now, for real or dry."""
    function: str
    """The autograd Function of the glue that runs just now, by name."""
    cached: CachedWeights
    """Parametrized weights that are kept for the microbatch."""

    @property
    def is_in_unit(self) -> bool:
        """Whether code of a unit runs just now."""

    def unit(self, name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        """Call a unit."""

    def recomputing(self, treatment: ActivationPolicy) -> AbstractContextManager[None]:
        """In here units are recomputed so, unless more is to be done with them anyway."""

    def operation(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Apply an operation of the glue."""

    def read(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute ``function`` from values, on every stage."""

    def hook_gradient(self, tensor: "PlacedTensor", hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call ``hook`` with the gradient of ``tensor``."""

    def lives_on(self, tensor: "PlacedTensor") -> int:
        """The stage that made ``tensor``."""

    def check_current(self, tensor: "PlacedTensor") -> None:
        """Refuse a tensor whose memory was changed through a view on another stage."""

    def bring(self, spec: TensorSpec, stages: Iterable[int], tensor: Tensor | None) -> "PlacedTensor":
        """A placed tensor of this program for one that exists already, on ``stages``."""


@final
class PlacedTensor(Tensor):
    """See the module docstring. Made by an :class:`Interpreter` only.

    Attributes:
        program: the interpreter of the microbatch that it belongs to.
        value: its number and size in the program's record.
        spec: its metadata.
        origin: on stages that hold it, the segment in which it was made or received and the real tensor there.
        current: the segment that used it last and the real tensor that this segment works on.
        born: the segment in which it was made or last changed.
        memory: shared with its views and detached tensors.
        version: the version of the memory that it stands for.
        known: its value on every stage, once code after the end of the program has asked for it.
        family: number that it has in common with its views (autograd's base), not with detached tensors.
    """

    program: Interpreter
    value: Value
    spec: TensorSpec
    origin: tuple[int, Tensor] | None = None
    current: tuple[int, Tensor] | None = None
    born: SegmentId
    memory: TensorMemory
    version: int = 0
    family: int
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
        made._stand_for(program, value, spec, born)
        return made

    @classmethod
    def from_plain(
        cls, tensor: Tensor, program: Interpreter, value: Value, spec: TensorSpec, born: SegmentId
    ) -> "PlacedTensor":
        """Make ``tensor`` itself, which every stage has and the user refers to, a placed tensor."""
        tensor.__class__ = cls
        assert isinstance(tensor, PlacedTensor)
        tensor._stand_for(program, value, spec, born)
        return tensor

    def _stand_for(self, program: Interpreter, value: Value, spec: TensorSpec, born: SegmentId) -> None:
        self.program = program
        self.value = value
        self.spec = spec
        self.born = born
        self.memory = TensorMemory()
        self.family = value.id

    def share(self, other: Tensor, *, is_view: bool) -> None:
        """Stand for the memory of ``other``, which this tensor is a view of or detached from."""
        if not isinstance(other, PlacedTensor):
            self.memory.is_plain = True
            return
        self.memory, self.version = other.memory, other.memory.version
        if is_view:
            self.family = other.family

    @property
    def is_stale(self) -> bool:
        """Whether its memory was changed through another tensor."""
        return self.version != self.memory.version

    def changed_in_place(self, value: Value, spec: TensorSpec, where: SegmentId) -> None:
        """Become the tensor that an in-place operation left behind."""
        if spec.size != self.spec.size:
            raise UnsupportedError(
                f"An in-place operation changed the shape of a placed tensor from {list(self.spec.size)} to "
                f"{list(spec.size)}. Use the operation that returns a new tensor."
            )
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(spec.requires_grad)
        self.value, self.spec, self.born = value, spec, where
        self.memory.version += 1
        self.memory.changed = (value, where, self.family)
        self.version = self.memory.version

    def begin_gradient(self, requires_grad: bool = True) -> "PlacedTensor":
        """``requires_grad_``: let gradients flow back to here, where what comes before needs none."""
        if requires_grad == self.spec.requires_grad:
            return self
        if not requires_grad:
            raise RuntimeError(
                "`requires_grad_(False)` of a tensor that was computed, in PyTorch as here: use `detach`."
            )
        begun = self.program.operation("requires_grad_", start_of_gradient, (self,), {})
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_()
        self.value, self.spec, self.born = begun.value, begun.spec, begun.born
        self.origin, self.current = begun.origin, begun.current
        return self

    def refresh(self, value: Value, spec: TensorSpec) -> None:
        """Become the tensor that a change through another one left behind, on the stage where both share memory."""
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(spec.requires_grad)
        self.value, self.spec, self.version = value, spec, self.memory.version

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """As for the real tensor: what requires a gradient here was computed."""
        return not self.spec.requires_grad

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        """Graphs live inside the real tensors; the placed one is part of none."""
        return

    @property
    def grad(self) -> None:  # type: ignore[override]
        """Gradients of activations stay on the stage that computes them."""
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
        if len(types) > 1 and any(getattr(kind, "has_home", False) for kind in types):
            return NotImplemented  # what hooks do with weights is not routed here
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in REFUSED:
            raise UnsupportedError(f"`{_name(func)}` of a placed tensor{_where()}: {REFUSED[func]}")
        program = _program_of(args, kwargs)
        if program is None:
            args, kwargs = _in_plain_lists(args), dict(zip(kwargs, _in_plain_lists(kwargs.values()), strict=True))
            program = _program_of(args, kwargs)
        if program is None:
            raise UnsupportedError(
                f"`{_name(func)}`{_where()} meets a placed tensor inside of an object. Give it as an argument: bare, "
                "or in a tuple, list, dict or dataclass."
            )
        if func is Tensor.register_hook:
            return program.hook_gradient(*args, **kwargs)
        if func is Tensor.requires_grad_:
            return args[0].begin_gradient(*args[1:], **kwargs)
        if func in READS:
            return program.read(_name(func), func, args, kwargs)
        return program.operation(_name(func), func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # where PyTorch wants a number, as in `torch.arange(n)`
            return args[0].program.read("item", Tensor.item, args, {})
        raise UnsupportedError(
            f"A placed tensor reached `{func}`{_where()} by a way that cannot be routed between stages (a C++ "
            "extension, a transform of torch.func, or torch.tensor(...) of a tensor in code above the units). Move "
            "this code into an nn.Module that holds the parameters it works on, so that it runs inside a unit."
        )


def _program_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Interpreter | None:
    for leaf in args:
        if isinstance(leaf, PlacedTensor):
            return leaf.program
    placed = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, PlacedTensor))
    return next((leaf.program for leaf in placed), None)


def _in_plain_lists(values: Iterable[Any]) -> tuple[Any, ...]:
    """``values``, where PyTorch takes lists of any class for lists, and its trees take only those of its own."""
    return tuple(list(value) if isinstance(value, (list, tuple)) else value for value in values)


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a property of Tensor, such as `T` or `data`
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def _where() -> str:
    """The first line outside torch and this package, for error messages."""
    for frame in inspect.stack(context=0)[2:]:
        module = str(frame.frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in ("torch", "smp_strategy"):
            return f" (in {frame.filename}, line {frame.lineno})"
    return ""


def number_of(bound: Any) -> Any:
    """A bound of a slice as Python would see it, which reads tensors."""
    return operator.index(bound) if isinstance(bound, Tensor) else bound
