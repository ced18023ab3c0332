"""What would this call return? Answered without computing, from metadata alone.

A stage that does not run a call still has to know the result: shapes, strides, dtypes, which outputs require a
gradient, whether an input was changed in place. The oracle runs the call once on fake tensors (no memory, no
arithmetic) and remembers the answer for every later call with the same metadata, so that in steady state a call of a
remote unit costs one dictionary look-up.

The same dry run measures what the call costs (FLOPs, bytes moved, bytes kept for backward) and whether it draws
random numbers.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smp_strategy.errors import UnsupportedError
from smp_strategy.trace.effects import attributes_put_back
from smp_strategy.trace.tree import flatten

__all__ = [
    *("Alias", "Callee", "Made", "Oracle", "Prediction", "Same", "TensorSpec", "ValueNeededError"),
    *("is_constant", "is_left_behind", "is_object"),
]

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))

# Shapes that change from batch to batch must not fill the memory.
MOST_PREDICTIONS = 1 << 14


class ValueNeededError(Exception):
    """The result's metadata depends on tensor values, so no dry run can tell it."""


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The metadata of ``tensor``."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}" + (" with gradient" * self.requires_grad)


@final
@dataclass(frozen=True, slots=True)
class Made:
    """An output that the call makes."""

    spec: TensorSpec


@final
@dataclass(frozen=True, slots=True)
class Same:
    """An output that is one of the call's inputs (a tensor changed in place, a cache handed through)."""

    leaf: int
    """Position among the flattened inputs."""


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """An output shares its memory with another tensor of the call."""

    leaf: int | None
    """Position of an input, or ``None``: the output ``made``."""
    made: int
    """Number among the :class:`Made` outputs."""
    is_view: bool
    """Whether autograd knows of it (a detached tensor shares memory, too)."""


@final
@dataclass(frozen=True)
class Prediction:
    """The result of a call, by metadata, and its costs."""

    outputs: tuple[Made | Same | Any, ...]
    """Flattened outputs; anything but :class:`Made` and :class:`Same` is a constant."""
    structure: Any
    """How to unflatten them (a pytree spec)."""
    changed: Mapping[int, TensorSpec]
    """Inputs that the call changes in place, by position, with their new metadata."""
    flops: int
    traffic: int
    saved_bytes: int
    random: bool
    """Whether the call draws random numbers."""
    aliases: tuple["Alias | None", ...] = ()
    """For each :class:`Made` output: the tensor whose memory it shares, if any."""


@final
@dataclass(frozen=True)
class Callee:
    """What is called: a unit or an operation."""

    key: object
    """Identity for the cache."""
    function: Callable[..., Any]
    module: nn.Module | None = None
    """The unit, whose parameters and buffers are replaced by fake ones in the dry run."""


@final
class Oracle:
    """Predicts calls and remembers the predictions.

    Args:
        device: device that the calls really run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[object, Prediction] = {}
        self._parts: dict[object, tuple[tuple[nn.Module, ...], tuple[nn.Parameter, ...]]] = {}

    def predict(
        self, callee: Callee, leaves: Sequence[Any], structure: Any, *, leave_marks: bool = False
    ) -> Prediction:
        """Predict ``callee(*args, **kwargs)`` for flattened arguments.

        Args:
            callee: what is called.
            leaves: flattened arguments; a tensor may be given by its :class:`TensorSpec`.
            structure: pytree spec of ``(args, kwargs)``.
            leave_marks: let a dry run write to objects among the arguments and set attributes with a gradient, so that
                it shows who uses them next. The caller puts all of this back.

        Raises:
            ValueNeededError: the result depends on values.
        """
        specs = [TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = (callee.key, structure, tuple(map(_key, specs)), self._switches(callee), _ambient(self._device))
        prediction = self._known.get(key)
        if prediction is None:
            if len(self._known) >= MOST_PREDICTIONS:
                self._known.clear()
            prediction = self._known[key] = self._dry_run(callee, specs, structure, leave_marks)
        return prediction

    def _switches(self, callee: Callee) -> tuple[object, ...]:
        """What of the unit itself can be switched between two calls: training mode and frozen parameters."""
        if callee.module is None:
            return ()
        if callee.key not in self._parts:
            self._parts[callee.key] = (tuple(callee.module.modules()), tuple(callee.module.parameters()))
        modules, parameters = self._parts[callee.key]
        return tuple([part.training for part in modules]), tuple([part.requires_grad for part in parameters])

    def _dry_run(self, callee: Callee, leaves: list[Any], structure: Any, leave_marks: bool) -> Prediction:
        meter = _Meter(callee)
        parameters = _tensors_of(callee.module)
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        # In-place changes are noticed by version counters, which tensors of inference mode do not have.
        grad = torch.is_grad_enabled()
        with _frozen_rng() as python_drew, torch.inference_mode(False), torch.set_grad_enabled(grad), self._mode:
            fakes = [leaf if leave_marks and is_object(leaf) else _stand_in(leaf) for leaf in leaves]
            stand_ins = {name: _imitate(TensorSpec.of(tensor), leaf=True) for name, tensor in parameters.items()}
            versions = {i: fake._version for i, fake in enumerate(fakes) if isinstance(fake, Tensor)}
            args, kwargs = pytree.tree_unflatten(fakes, structure)
            try:
                with (
                    torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
                    _attributes_of(callee.module, leave_marks),
                    meter,
                ):
                    result = _call(callee, stand_ins, args, kwargs)
            except _NEEDS_VALUES as error:
                raise ValueNeededError(str(error)) from error
            draws = meter.random or python_drew()
        flat, out_structure = flatten(result)
        for stand_in in stand_ins.values():
            saved.pop(stand_in.untyped_storage()._cdata, None)
        # A unit that draws random numbers may return its input this time and something new the next.
        returnable = [] if draws and callee.module is not None else fakes
        outputs = tuple(_classify(leaf, returnable) for leaf in flat)
        changed = {i: TensorSpec.of(fakes[i]) for i, version in versions.items() if fakes[i]._version != version}
        made = [output.spec for output in outputs if isinstance(output, Made)]
        aliases = _aliases(
            [leaf for leaf, output in zip(flat, outputs, strict=True) if isinstance(output, Made)], fakes
        )
        inputs = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
        traffic = sum(spec.nbytes for spec in (*made, *inputs)) + sum(t.nbytes for t in parameters.values())
        return Prediction(outputs, out_structure, changed, meter.flops, traffic, sum(saved.values()), draws, aliases)


class _Meter(TorchDispatchMode):
    """Counts FLOPs by PyTorch's own formulas, notices random operations and what another unit has left behind."""

    def __init__(self, callee: Callee) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callee = callee
        self.flops = 0
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._callee.module is not None:
            self._refuse_foreign(args, kwargs)
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                tensor.made_by = self._callee.key  # type: ignore[attr-defined]
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return result

    def _refuse_foreign(self, args: Any, kwargs: Any) -> None:
        for tensor in pytree.tree_leaves((args, kwargs)):
            maker = getattr(tensor, "made_by", self._callee.key)
            if maker != self._callee.key:
                raise UnsupportedError(
                    f"Unit `{self._callee.key}` uses a tensor that unit `{maker}` put into an object (a cache, say), "
                    "but the two may live on different stages. Return the tensor and give it as an argument, or use a "
                    "list or dict among the arguments."
                )


class _Fresh(torch.autograd.Function):
    """A tensor that is inside the graph and no view, like the output of any operation: in-place changes work."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def _imitate(spec: TensorSpec, *, leaf: bool = False) -> Tensor:
    """A fake tensor with the metadata of ``spec``; call it inside a FakeTensorMode."""

    def make() -> Tensor:
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=spec.device)

    if not spec.requires_grad:
        return make()
    with torch.enable_grad():
        if leaf:
            return make().requires_grad_()
        return _Fresh.apply(torch.empty((), requires_grad=True), make)  # type: ignore[no-untyped-call]


def _stand_in(leaf: Any) -> Any:
    """What the dry run gets instead of an argument: nothing that it does to it may reach the original."""
    if isinstance(leaf, TensorSpec):
        return _imitate(leaf)
    if not is_object(leaf):
        return leaf
    with _CopyAsFake():
        return copy.deepcopy(leaf)


def is_object(leaf: Any) -> bool:
    """Whether an argument is something with a state of its own that is no tensor and no module."""
    return not isinstance(leaf, (TensorSpec, Tensor, *_IMMUTABLE, slice, nn.Module, type)) and not callable(leaf)


def is_left_behind(leaf: Any) -> bool:
    """Whether ``leaf`` is a fake tensor of a dry run that should have gone with it."""
    return isinstance(leaf, FakeTensor)


def _attributes_of(module: nn.Module | None, leave_marks: bool) -> AbstractContextManager[None]:
    if module is None:
        return nullcontext()
    return attributes_put_back(
        module, leave=lambda value: leave_marks and is_left_behind(value) and value.requires_grad
    )


class _CopyAsFake(TorchFunctionMode):
    """Makes ``copy.deepcopy`` put fake tensors where an object (a key/value cache, say) holds tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return _imitate(TensorSpec.of(args[0]))
        return func(*args, **(kwargs or {}))


def _call(callee: Callee, stand_ins: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    if callee.module is None:
        return callee.function(*args, **kwargs)
    shim = _Shim(callee.module, callee.function)
    return torch.func.functional_call(shim, {f"unit.{name}": t for name, t in stand_ins.items()}, args, kwargs)


class _Shim(nn.Module):
    """Calls the unit's own ``forward`` without the hooks on the unit: those belong to the glue and run there."""

    def __init__(self, unit: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.unit = unit
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _tensors_of(module: nn.Module | None) -> dict[str, Tensor]:
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _classify(leaf: Any, inputs: list[Any]) -> Made | Same | Any:
    if isinstance(leaf, _IMMUTABLE):
        return leaf
    for position, given in enumerate(inputs):
        if leaf is given:
            return Same(position)
    return Made(TensorSpec.of(leaf)) if isinstance(leaf, Tensor) else leaf


def _aliases(made: list[Tensor], inputs: list[Any]) -> tuple[Alias | None, ...]:
    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    first: dict[int, tuple[int | None, int]] = {}
    for position, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor):
            first.setdefault(memory(leaf), (position, -1))
    found: list[Alias | None] = []
    for number, tensor in enumerate(made):
        leaf, other = first.setdefault(memory(tensor), (None, number))
        found.append(None if (leaf, other) == (None, number) else Alias(leaf, other, tensor._is_view()))
    return tuple(found)


def is_constant(leaf: Any) -> bool:
    """Whether ``leaf`` is a plain value, which all stages must agree on."""
    return isinstance(leaf, _IMMUTABLE)


def _key(leaf: Any) -> object:
    """What of an argument the result's metadata can depend on."""
    if isinstance(leaf, slice):
        return slice, leaf.start, leaf.stop, leaf.step
    if isinstance(leaf, (TensorSpec, *_IMMUTABLE)):
        return type(leaf), leaf
    # Caches and other objects with a state: taken to matter by type only. The stage that runs the call compares the
    # real result with the prediction, so a wrong guess is an error and never a wrong number.
    return type(leaf)


def _ambient(device: torch.device) -> tuple[object, ...]:
    """The thread's modes that change what operations return."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype()


@contextmanager
def _frozen_rng() -> Iterator[Callable[[], bool]]:
    """Put all random streams back afterwards; yields whether Python's or numpy's have moved."""

    def python_streams() -> tuple[Any, ...]:
        state = np.random.get_state(legacy=False)
        return random.getstate(), str(state["state"]["key"].tobytes()), state["state"]["pos"], state["has_gauss"]

    python_state, numpy_state, before = random.getstate(), np.random.get_state(), python_streams()
    with torch.random.fork_rng(devices=[]):
        try:
            yield lambda: python_streams() != before
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
