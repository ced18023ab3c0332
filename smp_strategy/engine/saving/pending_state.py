"""Pending state: loaded state that waits for the partition, which decides which rank holds what.

Before the first step every rank has the full module, so values go there, if it has memory. The state of optimizers,
gradients, and parameters without memory are pending: after the partition each rank loads its share of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.load import MODULE, load_gradients, load_module, load_optimizer, read_optimizer
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, Source
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.engine.delayed_init import DelayedModule

__all__ = ["PendingState", "PendingOptimizerState"]


class PendingOptimizerState(NamedTuple):
    """Loaded state of an optimizer."""

    source: Source
    number: int
    names: Mapping[nn.Parameter, str]
    """Names of the parameters in the source."""

    def read(self) -> dict[nn.Parameter, Any]:
        """Full state, on the host."""
        return read_optimizer(self.source, self.number, self.names)


@final
class PendingState:
    """Loaded state of module, optimizers and gradients until the partition is decided.

    Attributes:
        optimizers: Pending state by optimizer.
    """

    def __init__(self) -> None:
        self._module: tuple[Source, bool] | None = None
        self.optimizers: dict[Optimizer, PendingOptimizerState] = {}
        self._gradients: Source | None = None

    def expect_module(self, source: Source, *, strict: bool) -> None:
        """Let parameters without memory get their values from ``source``."""
        self._module = source, strict

    def expect_gradients(self, source: Source) -> None:
        """Let training continue with the gradients of ``source``."""
        self._gradients = source

    def give_whole(self, delayed: DelayedModule) -> None:
        """Give full values to parameters without memory now, because copies of the module are made from them."""
        if self._module is None:
            return
        names = {tensor: f"{MODULE}.{name}" for tensor, name in delayed.expected.items()}
        values: dict[Tensor, Tensor] = {
            tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=delayed.device) for tensor in names
        }
        self._module[0].fill({names[tensor]: HeldTensor.whole(value) for tensor, value in values.items()})
        delayed.take(values)

    def give_optimizers(self) -> None:
        """Load all pending state into the optimizers, as in a single process: there is no first step."""
        for optimizer in self.optimizers:
            optimizer.load_state_dict(self.whole(optimizer))
        self.optimizers.clear()

    def whole(self, optimizer: Optimizer) -> dict[str, Any]:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        kept = {numbers[parameter]: value for parameter, value in self.optimizers[optimizer].read().items()}
        return {**optimizer.state_dict(), "state": dict(sorted(kept.items()))}

    def load(self, holdings: Holdings) -> None:
        """Load this rank's share of all pending state."""
        if self._module is not None:
            source, strict = self._module
            load_module(holdings.module, source, holdings, strict=strict)
        for optimizer, (source, number, names) in self.optimizers.items():
            load_optimizer(optimizer, source, number, holdings, names)
        if self._gradients is not None:
            load_gradients(self._gradients, holdings)
        self._module, self._gradients = None, None
        self.optimizers.clear()
