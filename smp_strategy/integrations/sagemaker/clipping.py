"""``torch.nn.utils.clip_grad_norm_`` for parameters of a wrapped model: by the norm over the gradients of all ranks.

A rank has the gradients of its own part only, so PyTorch's function would clip each rank by a norm of its own.
"""

import functools
from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import Tensor

from smp_strategy.integrations.sagemaker.run_state import current_run, is_initialized

__all__ = ["GlobalClipping"]

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
