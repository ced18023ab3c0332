"""Loss scaling rules for float16: the scale, and how it changes from step to step.

In float16, gradients below 6e-8 are zero and those above 65504 infinite. So the loss is multiplied by a scale before
backward, and the gradients are divided by it before they are used. The scale is as large as possible: when gradients
overflow, the step is skipped and the scale shrinks; after a number of steps without overflow it grows. The rules are
SageMaker's, a superset of PyTorch's ``GradScaler``, computed in single precision like there.

Pure functions from one value to the next.
"""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from smp_strategy.config.precision_options import PrecisionOptions

__all__ = ["LossScale", "ScalingRules"]


@final
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale, and the counters that its next change depends on."""

    scale: float
    """Factor of the loss."""
    good_steps: int = 0
    """Steps without overflow since the last overflow or the last growth."""
    hysteresis: int = 1
    """Number of overflows until the scale shrinks: 1 means at the next one."""


@final
@dataclass(frozen=True, kw_only=True)
class ScalingRules:
    """Initial value and changes of the scale."""

    init_scale: float = PrecisionOptions.init_scale
    growth_factor: float = PrecisionOptions.scale_factor
    """Factor of growth; 1 for a static scale."""
    backoff_factor: float = 1 / PrecisionOptions.scale_factor
    """Factor of shrinking; 1 for a static scale."""
    window: int = PrecisionOptions.scale_window
    """Steps without overflow after which it grows."""
    min_scale: float = PrecisionOptions.min_scale
    """Lower bound when shrinking."""
    delayed_shift: int = PrecisionOptions.delayed_shift
    """Overflows that make it shrink."""
    consecutive_hysteresis: bool = PrecisionOptions.consecutive_hysteresis
    """Whether these overflows must be consecutive; otherwise they are counted until it grows."""

    @classmethod
    def of(cls, options: PrecisionOptions) -> Self:
        """Rules of the user's options."""
        if isinstance(options.loss_scale, (int, float)):
            return cls.static(options.loss_scale)
        return cls(
            init_scale=options.init_scale,
            growth_factor=options.scale_factor,
            backoff_factor=1 / options.scale_factor,
            window=options.scale_window,
            min_scale=options.min_scale,
            delayed_shift=options.delayed_shift,
            consecutive_hysteresis=options.consecutive_hysteresis,
        )

    @classmethod
    def like(cls, scaler: Any) -> Self:
        """Rules of a ``torch.amp.GradScaler``."""
        return cls(
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            window=scaler.get_growth_interval(),
            min_scale=0.0,
        )

    @classmethod
    def static(cls, scale: float) -> Self:
        """A scale that never changes."""
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0, min_scale=scale)

    @property
    def is_static(self) -> bool:
        """Whether the scale never changes."""
        return self.growth_factor == self.backoff_factor == 1.0

    def begin(self) -> LossScale:
        return LossScale(scale=_single(self.init_scale), hysteresis=self.delayed_shift)

    def next(self, state: LossScale, *, overflowed: bool) -> LossScale:
        """The scale after a step, which was skipped if a gradient has ``overflowed``."""
        if overflowed:
            return self._after_overflow(state)
        good_steps = state.good_steps + 1
        grows = good_steps == self.window
        larger = _single(state.scale * self.growth_factor)
        return LossScale(
            scale=larger if grows and math.isfinite(larger) else state.scale,
            good_steps=0 if grows else good_steps,
            hysteresis=self.delayed_shift if grows or self.consecutive_hysteresis else state.hysteresis,
        )

    def _after_overflow(self, state: LossScale) -> LossScale:
        if state.hysteresis > 1:
            return LossScale(scale=state.scale, hysteresis=state.hysteresis - 1)
        smaller = _single(state.scale * self.backoff_factor)
        return LossScale(scale=max(smaller, min(self.min_scale, state.scale)), hysteresis=state.hysteresis)

    def is_stuck(self, state: LossScale) -> bool:
        """Whether another overflow would not change the scale."""
        return self._after_overflow(state).scale == state.scale and state.hysteresis == 1

    # The format of PyTorch, so that either loads the states of the other

    def state_dict(self, state: LossScale) -> dict[str, Any]:
        """``state`` under the names of ``torch.amp.GradScaler.state_dict``, and one name of our own."""
        growth, backoff = (2.0, 0.5) if self.is_static else (self.growth_factor, self.backoff_factor)
        return {
            "scale": state.scale,
            "growth_factor": growth,
            "backoff_factor": backoff,
            "growth_interval": self.window,
            "_growth_tracker": state.good_steps,
            "hysteresis": state.hysteresis,
        }

    def restored(self, saved: Mapping[str, Any]) -> LossScale:
        """The scale with which a run resumes from ``saved``.

        The rules, and a static scale, are those of this run.
        """
        if self.is_static:
            return self.begin()
        return LossScale(
            scale=_single(float(saved["scale"])),
            good_steps=min(int(saved["_growth_tracker"]), self.window - 1),
            hysteresis=min(int(saved.get("hysteresis", self.delayed_shift)), self.delayed_shift),
        )


def _single(value: float) -> float:
    """``value``, rounded to single precision."""
    return ctypes.c_float(value).value
