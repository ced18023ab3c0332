"""Wraps the calls of units with activation checkpointing and offload.

The runtime calls this for every call of a unit that runs on its stage. A call that will be recomputed brings a context
that restores its random numbers; everything else that it depends on is recorded here.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import nn

from smp_strategy.activations.checkpoint import CheckpointGroups, CheckpointInputs, Recomputed
from smp_strategy.activations.checkpoint_state import Bystanders, ModuleSnapshot, autocast_of_now
from smp_strategy.activations.offload import Offload
from smp_strategy.activations.policy import KEEP, ActivationPolicies, ActivationPolicy
from smp_strategy.activations.selective import Products
from smp_strategy.distributed.host_copies import HostCopies
from smp_strategy.distributed.rng_state import replay_from_now
from smp_strategy.model.trace.parametrize_cache import cache_of_now
from smp_strategy.model.trace.pytree import flatten_call, flatten_result

__all__ = ["UnitWrapper", "UnitCall"]

_Again = Callable[[], AbstractContextManager[Any]]


@final
class UnitCall(NamedTuple):
    """A call of a unit that is about to run."""

    name: str
    module: nn.Module
    token: object
    """Equal for the calls of one microbatch."""
    random: _Again | None = None
    """Context in which it draws its random numbers, the same at each entry; ``None``: it draws none."""
    asked: ActivationPolicy | None = None
    """Policy requested by the code above the units for this call, if any."""
    changed: Collection[int] = ()
    """Positions of arguments that the call changes in place."""
    is_compiled: bool = False
    """Whether it runs through ``torch.compile``."""


@final
class UnitWrapper:
    """Applies activation policies to the calls of units. One object lasts for all steps of a stage.

    Args:
        activation_policies: Policies of the units.
        device: Device of the units.
        bystanders: See :data:`~smp_strategy.activations.checkpoint_state.Bystanders`.
        offload: Offload of the stage, used by units whose policy asks for it.

    Attributes:
        offload: As given.
        repeating: Unit that is being recomputed now, if any.
        switched: Returns a context factory that restores what the step has switched around the unit.
    """

    def __init__(
        self,
        activation_policies: ActivationPolicies | None = None,
        device: torch.device | None = None,
        bystanders: Bystanders = lambda unit: ((), ()),
        offload: Offload | None = None,
    ) -> None:
        self.repeating: nn.Module | None = None
        self.switched: Callable[[], _Again] = lambda: nullcontext
        self._policies = activation_policies or {}
        self._device = device or torch.device("cpu")
        self.offload = offload or Offload(HostCopies(self._device))
        self._bystanders = bystanders
        self._groups = CheckpointGroups()

    @property
    def recomputes(self) -> bool:
        """Whether some units are always recomputed."""
        return any(policy.recompute != "no" for policy in self._policies.values())

    def around(self, call: UnitCall, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrapper of ``function``, which runs the unit of ``call``."""
        policy = self._policies.get(call.name, KEEP)
        if call.asked is not None and policy.recompute == "no":
            policy = replace(call.asked, offload=policy.offload)
        if policy.is_default or not torch.is_grad_enabled():
            return function
        if policy.recompute == "all" or (policy.recompute == "cheap" and not call.is_compiled):
            function = self.recomputed(call, policy, function)
        # Outermost, so that it also sees the saved inputs of a checkpointed call.
        return self.offload.around(function, call.module) if policy.offload else function

    def recomputed(self, call: UnitCall, policy: ActivationPolicy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrapper of ``function`` that recomputes it in backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = flatten_call(args, kwargs)
            joined = self._groups.join(call.name, call.token, leaves, policy.group)
            found = ModuleSnapshot(call.name, call.module, leaves, self._bystanders)
            random = None
            if policy.preserve_rng_state:
                # It may draw after all: what was predicted of it goes by its arguments, and its attributes can change.
                random = call.random or replay_from_now(self._device, only_torch=True)
            once = Recomputed(
                call.name,
                function,
                structure,
                CheckpointInputs(leaves, call.changed, joined.made),
                self._as_before(call.module, found, random),
                earlier=joined.earlier,
                products=Products() if policy.recompute == "cheap" else None,
            )
            result = once.call(args, kwargs)
            found.settle()
            self._groups.note(call.name, call.token, once, flatten_result(result)[0], joined.size)
            return result

        return run

    def _as_before(self, module: nn.Module, found: ModuleSnapshot, random: _Again | None) -> _Again:
        """Opens a context in which the call can be run again."""
        autocast, cache, switched = autocast_of_now(self._device), cache_of_now(), self.switched()

        @contextmanager
        def again() -> Iterator[None]:
            before, self.repeating = self.repeating, module
            try:
                with ExitStack() as stack:
                    stack.enter_context(switched())
                    stack.enter_context(found.again())
                    stack.enter_context(autocast())
                    stack.enter_context(cache())
                    stack.enter_context(nullcontext() if random is None else random())
                    yield
            finally:
                self.repeating = before

        return again
