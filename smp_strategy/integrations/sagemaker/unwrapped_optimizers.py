"""Optimizers of a wrapped model that step without ``smp.DistributedOptimizer``: their gradients would not be final."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.sagemaker.run_state import RunState

__all__ = ["refuse_unwrapped"]


def refuse_unwrapped(run: RunState) -> Callable[[], None]:
    """Refuse steps of such optimizers until the function that is returned is called."""

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if run.shape.world_size == 1 or any(optimizer in (each, each.optimizer) for each in run.optimizers):
            return
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for model in run.models:
            if model.partitioned and any(id(each) in trained for each in model.module.parameters()):
                name = type(optimizer).__name__
                raise UnsupportedError(
                    f"{name} steps without being wrapped, but its gradients are not final and its parameters are "
                    "spread over the ranks. Wrap it: `optimizer = smp.DistributedOptimizer(optimizer)`."
                )

    return register_optimizer_step_pre_hook(check).remove
