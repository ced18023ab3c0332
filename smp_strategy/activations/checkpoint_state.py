"""Snapshot of a unit's mutable state, and of autocast, so that recomputation starts from the same state.

A unit may count its calls, keep running statistics, fill a cache or a list. When it is recomputed in backward, it must
find the state of the first run, or it would compute something else, and its side effects must not happen twice. So the
attributes and buffers of the unit's modules, and the contents of objects among its arguments, are captured at the call
and restored for the second run. Afterwards everything is as it was before that run.

Attributes are captured by reference; lists, dicts and sets in them, buffers, and other tensors in attributes are
copied. Copies of tensors that the call has not changed are dropped when it is over, unless they are small: code can
change a tensor through ``.data``, which leaves no trace.

Parameters are not copied. If others were lent to the unit for the call (``functional_call``), these are put in place
again. A unit that changes its own parameters cannot be recomputed, and one whose parameters have changed since would
compute with the wrong ones: both are errors.

Random generators are restored by the caller (:class:`~smp_strategy.activations.unit_wrapper.UnitCall`): by the seed of
the call, or by their state in the middle of a unit (:func:`~smp_strategy.distributed.rng_state.replay_from_now`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.side_effects import additions, containers_of_objects
from smp_strategy.model.trace.snapshot import Snapshot, containers_in, contents_of, replaced

__all__ = ["Bystanders", "ModuleSnapshot", "autocast_of_now"]

Bystanders = Callable[[nn.Module], tuple[Sequence[nn.Module], Sequence[Any]]]
"""Modules and containers outside of a unit that hooks in it may change."""

SMALL_BYTES = 1 << 16
"""Tensors up to this size stay copied whether or not they have changed."""

# Attributes of every module that calls do not change, `training` aside.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@final
class ModuleSnapshot:
    """Snapshot of a unit's mutable state (attributes, buffers, containers), taken before the call.

    Args:
        name: Name of the unit.
        module: The unit.
        leaves: Its flattened arguments.
        bystanders: Modules and containers that its hooks may change, see :data:`Bystanders`.
    """

    def __init__(self, name: str, module: nn.Module, leaves: Sequence[Any], bystanders: Bystanders) -> None:
        self._name = name
        self._module = module
        self._bystanders = bystanders
        self._tensors: dict[int, _Copied] = {}
        self._state = Snapshot()
        self._weights: list[tuple[Tensor, int, bool]] = []
        for container in containers_of_objects(leaves):
            self._state.add(container)
        for part in module.modules():
            self._add_part(vars(part))

    def _add_part(self, held: dict[str, Any]) -> None:
        """Capture attributes, buffers and parameters of a module of the unit."""
        own = {key: value for key, value in held.items() if key not in _OF_EVERY_MODULE}
        self._state.add(held, replaced(own, self._noted), ignored=_OF_EVERY_MODULE)
        for container in containers_in(own.values()):
            self._state.add(container, replaced(contents_of(container), self._noted))
        for kind in ("_buffers", "_parameters"):
            tensors = held[kind]
            if not isinstance(tensors, dict):  # of TorchScript, whose tensors nobody can put into the place of others
                self._weights += [(each, each._version, each.requires_grad) for each in tensors.values()]
            elif kind == "_parameters":
                self._state.add(tensors)
                present = [each for each in tensors.values() if each is not None]
                self._weights += [(each, each._version, each.requires_grad) for each in present]
            else:
                self._state.add(tensors, replaced(tensors, self._noted))

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

        with ExitStack() as stack:
            stack.enter_context(self._bystanders_restored())
            stack.enter_context(self._state.of_now())
            for tensor, _, is_trained in self._weights:
                if tensor.requires_grad != is_trained and tensor.is_leaf:  # frozen or unfrozen since
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(is_trained)
            self._state.restore(found)
            stack.enter_context(additions())
            yield

    def _bystanders_restored(self) -> Snapshot:
        if not any(part._forward_hooks or part._forward_pre_hooks for part in self._module.modules()):
            return Snapshot()
        modules, containers = self._bystanders(self._module)
        return Snapshot(modules=modules, containers=containers)

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
