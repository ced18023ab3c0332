"""Gradient scaler for float16, with the methods of PyTorch's ``GradScaler``, in agreement over all ranks.

Lightning, Accelerate and users know these methods: ``scale`` the loss, ``unscale_`` the gradients of an optimizer,
``step`` unless they have overflowed, ``update`` the scale. PyTorch's scaler looks at the gradients of one rank only,
and ranks that decide differently would train different models. Here every rank learns whether any rank has found an
infinite gradient, and all of them skip the step.

Gradients carry the scale of the backward that made them. If several optimizers step after one backward, the ``update``
after the first may change the scale, so the others divide by the scale that their gradients carry, unless these are
unscaled already, to be clipped. If an optimizer keeps accumulating while another steps, or after clipping, its
gradients are first brought to the scale of the next backward.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from smp_strategy.data_parallel.grad_norm import UnscaleResult
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.errors import SMPError

__all__ = ["GradScaler", "Unscale"]

Unscale = Callable[[Optimizer, float], UnscaleResult]
"""Divides the gradients of an optimizer by a number, and returns the finding of all ranks."""


@final
class GradScaler:
    """Scales losses and unscales gradients.

    Args:
        unscale: Divides the gradients of an optimizer by a number and returns the finding of all ranks; collective
            (:meth:`smp_strategy.engine.engine.Engine.unscale`).
        optimizers: All optimizers, if several step at different times.
        warns: Whether to warn if gradients overflow and the scale cannot shrink.
    """

    def __init__(
        self,
        rules: ScalingRules,
        unscale: Unscale,
        optimizers: Callable[[], Iterable[Optimizer]] = tuple,
        *,
        warns: bool = True,
    ) -> None:
        self.rules = rules
        self._warns = warns
        self._unscale = unscale
        self._optimizers = optimizers
        self._now = rules.begin()
        self._carried = self._now.scale
        # Optimizers whose gradients are unscaled, until the `update` after their step.
        self._found: dict[Optimizer, UnscaleResult] = {}
        self._stepped: WeakSet[Optimizer] = WeakSet()
        # Findings since the last `update`, and the finding at the last step of each optimizer.
        self._news: set[UnscaleResult] = set()
        self._latest: WeakKeyDictionary[Optimizer, UnscaleResult] = WeakKeyDictionary()
        # Optimizers whose gradients were unscaled since the last backward: `scale` must not rescale them.
        self._divided: WeakSet[Optimizer] = WeakSet()

    def is_enabled(self) -> bool:
        """Always true; without float16 there is no scaler."""
        return True

    def get_scale(self) -> float:
        """Scale of the next backward."""
        return self._now.scale

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a loss or a list of losses, times the scale; call it right before backward."""
        if self._carried != self._now.scale:
            for optimizer in self._optimizers():
                if optimizer not in self._divided:
                    self._unscale(optimizer, self._carried / self._now.scale)
            self._carried = self._now.scale
        for optimizer in [each for each in self._found if each not in self._stepped]:
            self._unscale(optimizer, 1 / self._carried)
            del self._found[optimizer]
        self._divided.clear()
        return self._scaled(outputs)

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return outputs * torch.tensor(self._carried, device=outputs.device)
        return type(outputs)(map(self._scaled, outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale that they carry. Collective over all ranks.

        Raises:
            SMPError: They are unscaled already.
        """
        if self.has_unscaled(optimizer):
            raise SMPError(
                "`unscale_` has been called for this optimizer since the last backward: its gradients would be divided "
                "by the scale twice. Call it once between backward and the step."
            )
        found = self._found[optimizer] = self._unscale(optimizer, self._carried)
        self._news.add(found)
        self._divided.add(optimizer)

    def has_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of ``optimizer`` are unscaled already, for a step that is not over."""
        return optimizer in self._found

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, unless they are unscaled already. Collective over all ranks."""
        if not self.has_unscaled(optimizer):
            self.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(...)`` unless gradients have overflowed. Unscales them first if necessary."""
        self.ensure_unscaled(optimizer)
        self._latest[optimizer] = self._found[optimizer]
        self._stepped.add(optimizer)
        return None if self.has_skipped(optimizer) else optimizer.step(*args, **kwargs)

    def has_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last step of ``optimizer`` was skipped."""
        return self._latest.get(optimizer) is UnscaleResult.OVERFLOW

    def update(self) -> None:
        """Set the next scale after the optimizers have stepped. Without gradients nothing changes."""
        found, self._news = self._news, set()
        for optimizer in self._stepped:
            self._found.pop(optimizer, None)
        self._stepped.clear()
        if not found - {UnscaleResult.NOTHING}:
            return
        overflowed = UnscaleResult.OVERFLOW in found
        if overflowed and self._warns and self.rules.is_stuck(self._now):
            warnings.warn(self._complaint(), stacklevel=2)
        self._now = self.rules.next(self._now, overflowed=overflowed)

    def state_dict(self) -> dict[str, Any]:
        """State that ``torch.amp.GradScaler`` can load."""
        return self.rules.state_dict(self._now)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state saved by this class or by ``torch.amp.GradScaler``."""
        if state_dict:  # PyTorch's, if it is disabled, saves nothing
            self._now = self.rules.restored(state_dict)

    def _complaint(self) -> str:
        why = "static (`loss_scale`)" if self.rules.is_static else "as small as `min_scale` allows"
        remedy = "a smaller one, or `loss_scale=dynamic`" if self.rules.is_static else "a smaller `min_scale`"
        return (
            f"Gradients have overflowed, and the step is skipped, at a loss scale of {self._now.scale:g}, which is "
            f"{why}: the next steps may be skipped as well. Set {remedy}, or train in bfloat16."
        )
