"""Activation checkpointing of submodules inside units.

The runtime sees calls of units only. So the ``forward`` of a checkpointed module inside a unit (an attention, say) is
replaced on the instance while the engine owns the model. If the unit is compiled as a whole, the compiled code calls
PyTorch's `checkpoint`, which the compiler knows.

``checkpoint_sequential``: activation checkpointing of consecutive layers at their call, under SageMaker's name.

It calls PyTorch's `checkpoint` once per group. In code above the units the runtime intercepts that call and checkpoints
the units inside; inside a unit, and in an ordinary process, PyTorch's own runs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.unit_wrapper import UnitCall, UnitWrapper
from smp_strategy.config.activation_options import group_size
from smp_strategy.distributed.rng_state import replay_from_now
from smp_strategy.errors import ConfigError
from smp_strategy.model.patching import Patches

__all__ = ["SubmoduleCalls", "LayersInARow", "checkpoint_sequential"]


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


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """``sequential(input)`` with checkpoints around each layer or group of layers.

    Args:
        sequential: The layers.
        input: Input of the first layer.
        strategy: ``each`` layer by itself, all of a stage together (``contiguous``), or N of them (``group_N``). No
            group spans stages.
        preserve_rng_state: Draw the same random numbers when recomputing.
        pack_args_as_tuple: Pass a tuple that a layer returns to the next layer as one argument instead of unpacking
            it.

    Raises:
        ConfigError: ``strategy`` is none of these.
    """
    size = group_size(strategy)
    if size == 0:
        raise ConfigError(f"`strategy` must be each, contiguous or group_N with N from 1 on, but is {strategy!r}.")
    layers = list(sequential.children())
    step = size or max(len(layers), 1)
    for first in range(0, len(layers), step):
        row = LayersInARow(layers[first : first + step], size, pack_args_as_tuple)
        input = torch_checkpoint.checkpoint(row, input, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    return input


@final
class LayersInARow:
    """Consecutive layers as one function.

    Args:
        layers: The layers, in order.
        group: Number of layers that are recomputed together; ``None``: as many as possible.
        packs: Whether a tuple is passed as one argument.
    """

    def __init__(self, layers: Sequence[nn.Module], group: int | None, packs: bool) -> None:
        self.group = group
        self._layers = layers
        self._packs = packs

    def __call__(self, value: Any) -> Any:
        for layer in self._layers:
            value = layer(*value) if isinstance(value, tuple) and not self._packs else layer(value)
        return value
