"""Activation checkpointing of submodules inside units.

The runtime sees calls of units only. So the ``forward`` of a checkpointed module inside a unit (an attention, say) is
replaced on the instance while the engine owns the model. If the unit is compiled as a whole, the compiled code calls
PyTorch's `checkpoint`, which the compiler knows.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.unit_wrapper import UnitCall, UnitWrapper
from smp_strategy.distributed.rng_state import replay_from_now
from smp_strategy.model.patching import Patches

__all__ = ["SubmoduleCalls"]


@final
class SubmoduleCalls:
    """Routes calls of checkpointed submodules to the unit wrapper.

    Args:
        activations: Unit wrapper of the stage.
        device: Device of the units.
        is_on: Whether a unit is running to compute something, and not only being traced.
    """

    def __init__(self, activations: UnitWrapper, device: torch.device, is_on: Callable[[], bool]) -> None:
        self._activations = activations
        self._device = device
        self._is_on = is_on
        self._stand_ins = Patches()

    def intercept(self, parts: Mapping[str, tuple[nn.Module, ActivationPolicy]]) -> None:
        """Replace the ``forward`` of ``parts``, given by their qualified names."""
        for name, (module, policy) in parts.items():
            self._stand_ins.replace(module, self._replacement(name, module, policy))

    def give_back(self) -> None:
        """Restore the modules' own ``forward``."""
        self._stand_ins.give_back()

    def lifted(self) -> AbstractContextManager[None]:
        """Context in which the modules have their own ``forward``."""
        return self._stand_ins.lifted()

    def _replacement(self, name: str, part: nn.Module, policy: ActivationPolicy) -> Callable[..., Any]:
        original = part.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            if torch.compiler.is_compiling():
                return torch_checkpoint.checkpoint(
                    original, *args, use_reentrant=False, preserve_rng_state=policy.preserve_rng_state, **kwargs
                )
            if not self._is_on():
                return original(*args, **kwargs)
            random = replay_from_now(self._device) if policy.preserve_rng_state else None
            call = UnitCall(name, part, None, random=random)
            return self._activations.recomputed(call, policy, original)(*args, **kwargs)

        return forward
