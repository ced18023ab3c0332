"""``smp.amp``: a gradient scaler in which all ranks agree."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from smp_strategy.engine.updates.grad_scaler import GradScaler as AgreeingScaler
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.integrations.sagemaker.run_state import current_run

__all__ = ["GradScaler"]


def GradScaler(  # SageMaker's name of a class
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> AgreeingScaler:
    """Make a scaler with the methods of ``torch.amp.GradScaler``; scale the loss in the step with it.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: as of PyTorch's.
        enabled: ``False``: a scale of 1 that never changes.
    """
    rules = ScalingRules(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        window=growth_interval,
        min_scale=0.0,
    )
    return AgreeingScaler(rules if enabled else ScalingRules.static(1.0), _unscale, _optimizers)


def _optimizers() -> Iterable[Optimizer]:
    return list(current_run().optimizers)


def _unscale(optimizer: Any, scale: float) -> Any:
    for each in current_run().optimizers:
        if optimizer in (each, each.optimizer):
            each.make_final()
            return each.model.engine.unscale(each.optimizer, scale)
    raise AssertionError("an optimizer that is not wrapped")
