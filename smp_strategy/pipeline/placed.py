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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.trace.events import Value
from smp_strategy.trace.oracle import TensorSpec

if TYPE_CHECKING:
    from smp_strategy.pipeline.program import Program

__all__ = ["METADATA", "Memory", "PlacedTensor"]

METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "names", "itemsize", "nbytes"),
                *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu"),
                *("is_mkldnn", "is_mtia", "is_maia", "is_vulkan", "is_ipu", "is_sparse_csr"),
            )
            if hasattr(Tensor, name)
        ),
        *(
            getattr(Tensor, name)
            for name in (
                *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"),
                *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj", "is_neg"),
                *("is_inference", "get_device", "__len__", "is_same_size"),
            )
        ),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_conj, torch.is_neg),
        torch.is_inference,
    }
)
_READS: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in (
                *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__"),
                *("__index__", "__repr__", "__format__", "__contains__", "equal", "allclose", "is_nonzero"),
            )
        ),
        *(torch.equal, torch.allclose, torch.is_nonzero),
    }
)


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


_REFUSED: dict[Any, str] = {
    Tensor.backward: "Return the loss from the step and let the trainer call backward on it.",
    Tensor.retain_grad: "Gradients of activations stay on the stage that computes them.",
    Tensor.register_hook: "Register the hook on a tensor inside a module, or use a module hook.",
    Tensor.requires_grad_: "Create the tensor inside a module.",
    Tensor.data_ptr: "A placed tensor has memory on one stage only.",
    Tensor.share_memory_: "A placed tensor has memory on one stage only.",
    Tensor.resize_: "Make a new tensor instead.",
    Tensor.set_: "Make a new tensor instead.",
    _setter("data"): "Use an operation that returns a new tensor.",
    _setter("grad"): "Gradients of activations stay on the stage that computes them.",
    _setter("requires_grad"): "Create the tensor inside a module.",
    torch.autograd.backward: "Return the loss from the step and let the trainer call backward on it.",
    torch.autograd.grad: "Move the computation that needs gradients into an nn.Module that belongs to a unit.",
}


@final
@dataclass(eq=False, slots=True)
class Memory:
    """What a tensor shares with its views. A change through one of them reaches them all, where they really share."""

    is_plain: bool = False
    """Whether it is that of a tensor that exists on every stage."""
    version: int = 0
    """Number of changes in place."""
    changed: tuple[Value, SegmentId, int] | None = None
    """The last changed tensor, where that happened, and its :attr:`PlacedTensor.family`."""


@final
class PlacedTensor(Tensor):
    """See the module docstring. Made by :class:`~smp_strategy.pipeline.program.Program` only.

    Attributes:
        program: the microbatch's program that it belongs to.
        value: its number and size in the program's record.
        spec: its metadata.
        origin: on stages that hold it, the segment in which it was made or received and the real tensor there.
        current: the segment that used it last and the real tensor that this segment works on.
        born: the segment in which it was made or last changed.
        memory: shared with its views and detached tensors.
        version: the version of the memory that it stands for.
        family: number that it has in common with its views (autograd's base), not with detached tensors.
    """

    program: "Program"
    value: Value
    spec: TensorSpec
    origin: tuple[int, Tensor] | None
    current: tuple[int, Tensor] | None
    born: SegmentId
    memory: Memory
    version: int
    family: int

    @staticmethod
    def __new__(cls, program: "Program", value: Value, spec: TensorSpec, born: SegmentId) -> "PlacedTensor":
        made: PlacedTensor = Tensor._make_wrapper_subclass(
            cls,
            spec.size,
            strides=spec.stride,
            dtype=spec.dtype,
            device=spec.device,
            requires_grad=spec.requires_grad,
        )
        made.program = program
        made.value = value
        made.spec = spec
        made.origin = made.current = None
        made.born = born
        made.memory, made.version, made.family = Memory(), 0, value.id
        return made

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
        if func in _REFUSED:
            raise UnsupportedError(f"`{_name(func)}` of a placed tensor{_where()}: {_REFUSED[func]}")
        program = next(leaf.program for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, PlacedTensor))
        if func in _READS:
            return program.read(_name(func), func, args, kwargs)
        return program.operation(_name(func), func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(
            f"A placed tensor reached `{func}`{_where()} by a way that cannot be routed between stages (a C++ "
            "extension, a custom autograd Function, or torch.tensor(...) of a tensor in code above the units). Move "
            "this code into an nn.Module that holds the parameters it works on, so that it runs inside a unit."
        )


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
