"""The factor that keeps the gradients of float16 activations from vanishing, and how it changes from step to step.

Gradients below 6e-8 are zero in float16, those above 65504 infinite. So the loss is multiplied before backward, and the
gradients are divided before anybody uses them. The factor is as large as it can be: when gradients overflow the step is
skipped and the factor shrinks; after so many steps without overflow it grows. The rules are SageMaker's, of which
PyTorch's ``GradScaler`` has a part, computed as there in single precision.

Pure: a value, and the next one.
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
    """The factor, and what its next change depends on."""

    scale: float
    """What losses are multiplied by."""
    good_steps: int = 0
    """Steps without overflow since the last overflow, or since it has grown."""
    hysteresis: int = 1
    """The overflow that will make it shrink: the next one, the one after that ..."""


@final
@dataclass(frozen=True, kw_only=True)
class ScalingRules:
    """How the factor begins and changes."""

    init_scale: float = PrecisionOptions.init_scale
    """The first factor."""
    growth_factor: float = PrecisionOptions.scale_factor
    """It grows by this; 1 if it stays as it is."""
    backoff_factor: float = 1 / PrecisionOptions.scale_factor
    """It shrinks by this; 1 if it stays as it is."""
    window: int = PrecisionOptions.scale_window
    """Steps without overflow after which it grows."""
    min_scale: float = PrecisionOptions.min_scale
    """It does not shrink below this."""
    delayed_shift: int = PrecisionOptions.delayed_shift
    """Overflows that it takes to make it shrink."""
    consecutive_hysteresis: bool = PrecisionOptions.consecutive_hysteresis
    """Whether these have to follow each other directly; otherwise they are counted until it grows."""

    @classmethod
    def of(cls, options: PrecisionOptions) -> Self:
        """Those that the user has asked for."""
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
        """Those of a ``torch.amp.GradScaler``."""
        return cls(
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            window=scaler.get_growth_interval(),
            min_scale=0.0,
        )

    @classmethod
    def static(cls, scale: float) -> Self:
        """A factor that stays as it is."""
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0, min_scale=scale)

    @property
    def is_static(self) -> bool:
        """Whether the factor stays as it is."""
        return self.growth_factor == self.backoff_factor == 1.0

    def begin(self) -> LossScale:
        """The first factor."""
        return LossScale(scale=_single(self.init_scale), hysteresis=self.delayed_shift)

    def next(self, state: LossScale, *, overflowed: bool) -> LossScale:
        """The factor after a step.

        Args:
            state: the one of the step.
            overflowed: whether the step was skipped because some gradient was infinite or no number.
        """
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
        """Whether another overflow does not change the factor any more."""
        return self._after_overflow(state).scale == state.scale and state.hysteresis == 1

    # As PyTorch writes it down, so that either reads what the other has saved

    def state_dict(self, state: LossScale) -> dict[str, Any]:
        """``state`` under the names of ``torch.amp.GradScaler.state_dict``, and one of our own."""
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
        """What a run goes on with that has ``saved``; the rules are those of this run, as is a factor that stays."""
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
