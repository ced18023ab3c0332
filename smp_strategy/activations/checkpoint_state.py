"""Restoring a unit's state for recomputation: attributes, buffers and containers, autocast, random generators.

A unit may count its calls, keep running statistics, or fill a cache or a list. When it is recomputed, it must start
from the same state, and its side effects must not happen twice. So the attributes and buffers of its modules, and the
contents of objects among its arguments, are recorded at the call (:class:`ModuleSnapshot`); the second run sees the
recorded state, and afterwards everything is as before that run.

Attributes are recorded by reference. Lists, dicts and sets in them, buffers, and other tensors in attributes are
copied. Copies of tensors that the call has not changed are dropped when it is over, unless they are small: code can
change a tensor through ``.data``, which leaves no trace.

Parameters are not copied. If others were lent to the unit for the call (``functional_call``), the second run gets
those. A unit that changes its own parameters cannot be recomputed, and one whose parameters have changed since would
compute with the wrong ones: both are errors.

Autocast and the generators belong to the surroundings of a call. If the random numbers of a call begin at a seed of its
own, the caller restores them (:class:`~smp_strategy.activations.unit_wrapper.UnitCall`); a submodule is called in the
middle of the unit's random stream, whose state is recorded here.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.context_containers import additions
from smp_strategy.model.trace.side_effects import contents_of_objects, put_back
from smp_strategy.model.trace.undo_attributes import attributes_restored, containers_in, refill

__all__ = ["Bystanders", "ModuleSnapshot", "autocast_of_now", "random_of_now"]

Bystanders = Callable[[nn.Module], tuple[Sequence[nn.Module], Sequence[Any]]]
"""Modules and containers outside of a unit that hooks in it may change."""

SMALL_BYTES = 1 << 16
"""Tensors up to this size stay copied whether or not they have changed."""

# Attributes of every module that calls do not change, `training` aside.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@final
class ModuleSnapshot:
    """Snapshot of a unit's mutable state (attributes, buffers, containers), taken as the call begins.

    Args:
        name: Name of the unit.
        module: The unit.
        leaves: Its flattened arguments.
        bystanders: See :data:`Bystanders`.
    """

    def __init__(self, name: str, module: nn.Module, leaves: Sequence[Any], bystanders: Bystanders) -> None:
        self._name = name
        self._module = module
        self._bystanders = bystanders
        self._objects = contents_of_objects(leaves)
        self._tensors: dict[int, _Copied] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._parameters: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._weights: list[tuple[Tensor, int, bool]] = []
        for part in module.modules():
            held = vars(part)
            own = _own(held)
            self._attributes.append((held, {key: self._noted(value) for key, value in own.items()}))
            for container in containers_in(own.values()):
                self._containers[id(container)] = (container, _replaced(container, self._noted))
            for kind in ("_buffers", "_parameters"):
                if held[kind]:
                    self._note_tensors(held[kind], are_copied=kind == "_buffers")

    def _note_tensors(self, held: Any, *, are_copied: bool) -> None:
        if not isinstance(held, dict):  # of TorchScript, whose tensors cannot be replaced
            self._weights += [(each, each._version, each.requires_grad) for each in held.values()]
        elif are_copied:
            self._buffers.append((held, {key: self._noted(each) for key, each in held.items()}))
        else:
            self._parameters.append((held, dict(held)))
            present = [each for each in held.values() if each is not None]
            self._weights += [(each, each._version, each.requires_grad) for each in present]

    def _noted(self, value: Any) -> Any:
        """Recorded form of an attribute value."""
        if not isinstance(value, Tensor):
            return value
        if value.grad_fn is not None:  # the snapshot must not keep the graph of an earlier call alive
            return value.detach().requires_grad_()
        can_change = type(value) is Tensor and not value.requires_grad and not value.is_inference()
        return self._copied(value) if can_change else value

    def _copied(self, tensor: Tensor) -> "_Copied":
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = _Copied(tensor)
        return self._tensors[id(tensor)]

    def settle(self) -> None:
        """End of the call: drop copies of tensors that it has not changed.

        Raises:
            UnsupportedError: The call has changed a parameter.
        """
        changed = self._changed()
        if changed is not None:
            raise UnsupportedError(
                f"`{self._name}` changes its weights (one of shape {list(changed.shape)}) in its `forward`, so it "
                "cannot be computed again in backward. Leave it out of `activation_checkpointing`."
            )
        for tensor in self._tensors.values():
            tensor.settle()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context with the recorded state; on exit the state before it is restored.

        Raises:
            RuntimeError: Parameters have changed since the snapshot.
        """
        changed = self._changed()
        if changed is not None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {list(changed.shape)} of `{self._name}`, which is computed again in backward, and "
                "whose `forward` has used other values."
            )
        made = {copied: copied.value(self._name) for copied in self._tensors.values()}

        def found(value: Any) -> Any:
            return made[value] if isinstance(value, _Copied) else value

        containers = list(self._containers.values())
        with ExitStack() as stack:
            stack.enter_context(self._bystanders_restored())
            stack.callback(_refill_all, [(container, _contents(container)) for container, _ in self._objects])
            stack.callback(_refill_all, [(container, _contents(container)) for container, _ in containers])
            stack.callback(_put, [(held, _own(held)) for held, _ in self._attributes])
            for held, copies in self._buffers:
                stack.callback(refill, held, dict(held))
                held.update({key: found(each) for key, each in copies.items()})
            for held, parameters in self._parameters:
                stack.callback(refill, held, dict(held))
                refill(held, parameters)
            for tensor, _, is_trained in self._weights:
                if tensor.requires_grad != is_trained and tensor.is_leaf:  # frozen or unfrozen since
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(is_trained)
            _put([(held, {key: found(each) for key, each in own.items()}) for held, own in self._attributes])
            _refill_all([(container, _replaced(noted, found)) for container, noted in containers])
            put_back(self._objects)
            stack.enter_context(additions())
            yield

    @contextmanager
    def _bystanders_restored(self) -> Iterator[None]:
        if not any(part._forward_hooks or part._forward_pre_hooks for part in self._module.modules()):
            yield
            return
        modules, containers = self._bystanders(self._module)
        before = [(container, _contents(container)) for container in containers]
        with attributes_restored(modules):
            try:
                yield
            finally:
                _refill_all(before)

    def _changed(self) -> Tensor | None:
        return next((tensor for tensor, version, _ in self._weights if tensor._version != version), None)


@final
class _Copied:
    """Value of a tensor that may be changed in place."""

    __slots__ = ("_copy", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._copy: Tensor | None = tensor.detach().clone()

    def settle(self) -> None:
        is_small = self._tensor.numel() * self._tensor.element_size() <= SMALL_BYTES
        if self._tensor._version == self._version and not is_small:
            self._copy = None

    def value(self, name: str) -> Tensor:
        """The recorded value, for another call of the unit ``name``."""
        if self._copy is not None:
            # A copy of the copy: the second run changes it, too, and may not be the last.
            return self._copy.clone()
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"buffer or attribute of shape {list(self._tensor.shape)} of `{name}`, which is computed again in "
                "backward. Let the code that changes it make a new tensor, or leave the unit out of "
                "`activation_checkpointing`."
            )
        return self._tensor


def _own(held: dict[str, Any]) -> dict[str, Any]:
    """Attributes beyond those that every module has."""
    return {key: value for key, value in held.items() if key not in _OF_EVERY_MODULE}


def _replaced(container: Any, by: Callable[[Any], Any]) -> Any:
    """A copy of a list, dict or set with its items mapped by ``by``."""
    if isinstance(container, Mapping):
        return {key: by(value) for key, value in container.items()}
    return [by(item) for item in container]


def _contents(container: Any) -> Any:
    return dict(container) if isinstance(container, Mapping) else copy.copy(container)


def _put(attributes: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for held, own in attributes:
        for key in _own(held).keys() - own.keys():
            del held[key]
        held.update(own)


def _refill_all(contents: Sequence[tuple[Any, Any]]) -> None:
    for container, before in contents:
        refill(container, before)


Again = Callable[[], AbstractContextManager[Any]]
"""Opens a context that restores a recorded state."""


def autocast_of_now(device: torch.device) -> Again:
    """Current autocast settings of the CPU and of ``device``."""
    keeps_casts = torch.is_autocast_cache_enabled()
    settings = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", device.type))
    ]

    def again() -> ExitStack:
        stack = ExitStack()
        for kind, is_on, dtype in settings:
            if is_on or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, is_on, keeps_casts))
        return stack

    return again


def random_of_now(device: torch.device, *, only_torch: bool = False) -> Again:
    """Current states of the random generators; on exit of the context they continue as if nothing had been drawn.

    Args:
        device: Device whose generator is included, beside those of PyTorch, Python and numpy.
        only_torch: Leave out the last two, which take much longer.
    """
    return partial(_drawn_from, device, _states(device, only_torch), only_torch)


@contextmanager
def _drawn_from(device: torch.device, states: tuple[Any, ...], only_torch: bool) -> Iterator[None]:
    now = _states(device, only_torch)
    _set_states(device, states)
    try:
        yield
    finally:
        _set_states(device, now)


def _states(device: torch.device, only_torch: bool) -> tuple[Any, ...]:
    of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    others = (None, None) if only_torch else (random.getstate(), np.random.get_state())
    return torch.default_generator.get_state(), of_device, *others


def _set_states(device: torch.device, states: tuple[Any, ...]) -> None:
    of_torch, of_device, of_python, of_numpy = states
    torch.default_generator.set_state(of_torch)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)
    if of_python is not None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
