"""Parameters of wrapped models in PyTorch's own calls: gradient clipping, and optimizers that are not wrapped.

``torch.nn.utils.clip_grad_norm_`` clips by the norm over the gradients of all ranks: a rank has those of its own part
only, so PyTorch's function would clip each rank by a norm of its own. An optimizer that was not wrapped is refused: its
gradients would not be final.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.sagemaker.run_state import RunState, current_run, is_initialized

__all__ = ["GlobalClipping", "refuse_unwrapped"]

_PLACES: Final = (torch.nn.utils, torch.nn.utils.clip_grad)
_NAME: Final = "clip_grad_norm_"


@final
class GlobalClipping:
    """Replacement of PyTorch's function, until :meth:`remove`."""

    def __init__(self) -> None:
        self._before = [getattr(place, _NAME) for place in _PLACES]
        replaced = _around(self._before[0])
        for place in _PLACES:
            setattr(place, _NAME, replaced)

    def remove(self) -> None:
        """Put PyTorch's function back."""
        for place, before in zip(_PLACES, self._before, strict=True):
            setattr(place, _NAME, before)


def _around(original: Any) -> Any:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        known = {id(each) for each in given}
        for optimizer in current_run().optimizers if is_initialized() else ():
            engine = optimizer.model.engine
            own = any(id(each) in known for each in optimizer.model.module.parameters())
            if own and engine.partition is not None:
                optimizer.make_final()
                return engine.clip_grad_norm_(given, max_norm, float(norm_type))  # type: ignore[arg-type]
        return original(given, max_norm, norm_type, *args, **kwargs)

    return clip_grad_norm_


def refuse_unwrapped(run: RunState) -> Callable[[], None]:
    """Refuse steps of optimizers that are not wrapped, until the function that is returned is called."""

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
