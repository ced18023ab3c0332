"""Recorded unit calls of a dry run, replayable without the surrounding model.

Tensors are recorded as metadata; integers and masks of the batch keep their values, which select rows of tables and set
lengths of sequences. Two calls are of one kind if the units are built alike and get arguments of the same metadata.
Other objects (a key/value cache) are copied without the values of their tensors; they are compared by class.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.agreement.common_settings import shown
from smp_strategy.model.trace.fake_call import is_left_behind, stand_in
from smp_strategy.model.trace.prediction import IMMUTABLE, Callee
from smp_strategy.model.trace.pytree import flatten_call
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["CallLog", "Modes", "OpaqueArgument", "RecordedCall", "construction"]

# Attributes that every module has: tensors, submodules and hooks.
STATE = frozenset(vars(nn.Module())) - {"training"}


class Modes(NamedTuple):
    """Modes of the thread that affect a call: grad, inference, autocast."""

    computes_gradients: bool
    is_inference: bool
    autocast: torch.dtype | None

    @classmethod
    def current(cls, device_type: str) -> "Modes":
        """Modes of the calling thread."""
        is_on = torch.is_autocast_enabled(device_type)
        autocast = torch.get_autocast_dtype(device_type) if is_on else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def entered(self, device_type: str) -> Iterator[None]:
        """Set these modes for the duration of the context."""
        autocast = torch.autocast(device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.inference_mode(self.is_inference), torch.set_grad_enabled(self.computes_gradients), autocast:
            yield


class RecordedCall(NamedTuple):
    """Call of a unit with the metadata of its arguments."""

    unit: str
    callee: Callee
    leaves: tuple[Any, ...]
    """Flattened arguments; tensors as metadata."""
    structure: Any
    modes: Modes

    @property
    def kind(self) -> str:
        """Fingerprint of the unit's construction and the arguments' metadata; comparable across ranks."""
        assert self.callee.module is not None
        parts = [*construction(self.callee.module), *map(_description, self.leaves), self.structure, self.modes]
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    @property
    def obstacle(self) -> str:
        """Reason why the call cannot be replayed alone; empty if it can."""
        found = sorted({leaf.kind for leaf in self.leaves if isinstance(leaf, OpaqueArgument)})
        return f"it gets an object that cannot be copied ({', '.join(found)})" if found else ""


@final
class OpaqueArgument(NamedTuple):
    """Placeholder of an argument that cannot be copied."""

    kind: str


@final
class CallLog:
    """Recorder of unit calls.

    Attributes:
        calls: Recorded calls, in program order.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.calls: list[RecordedCall] = []

    def note(self, callee: Callee, args: Any, kwargs: Any) -> None:
        leaves, structure = flatten_call(args, kwargs)
        modes = Modes.current(self._device_type)
        self.calls.append(RecordedCall(str(callee.key), callee, tuple(map(_kept, leaves)), structure, modes))


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, PlacedTensor):
        return leaf.spec
    if isinstance(leaf, Tensor):
        has_values = not (leaf.is_meta or is_left_behind(leaf) or leaf.is_floating_point() or leaf.is_complex())
        return leaf if has_values else TensorSpec.of(leaf)
    try:
        return stand_in(leaf, lambda spec: torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta"))
    except Exception:  # copying runs methods of the user's object, which may raise anything
        return OpaqueArgument(type(leaf).__qualname__)


def construction(module: nn.Module) -> Iterator[str]:
    """Construction of a module: classes, options, shapes."""
    for name, part in module.named_modules():
        # Integers are ignored: they number layers. If they change the amount of work, the operations differ.
        options = {key: value for key, value in vars(part).items() if key not in STATE and type(value) is not int}
        yield f"{name} {type(part).__module__}.{type(part).__qualname__}({part.extra_repr()}) {shown(options)}"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"


def _description(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        leaf = TensorSpec.of(leaf)
    return repr(leaf) if isinstance(leaf, (TensorSpec, slice, *IMMUTABLE)) else type(leaf).__qualname__
