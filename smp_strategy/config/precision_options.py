"""The options of precision: in what units compute, gradients are added up and travel, and how losses are scaled.

Beside the others (:mod:`smp_strategy.config.options`), which are about where things are.
"""

import dataclasses
import typing
from typing import Literal

from smp_strategy.config.parsing import at_least_one, one_of

__all__ = ["PrecisionOptions"]

ReduceDtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Compute precision, where the front door does not choose it."""

    fp16: bool = False
    """Units compute in float16, with loss scaling, on weights that are kept in float32."""
    bf16: bool = False
    """Units compute in bfloat16, on weights that are kept in float32. SageMaker has this with sharding only."""
    fp16_params: bool = False
    """Parameters themselves are float16: there is no float32 copy of them. Units compute in float16."""
    reduce_dtype: ReduceDtype | None = None
    """In what gradients travel where they are summed over replicas or a shard group. ``None``: in what they are added
    up on each rank, which is float32 for half precision, too."""
    loss_scale: int | float | str | None = None
    """By what losses are multiplied, so that float16 gradients do not vanish: ``dynamic``, or a number that stays.
    ``None``: ``dynamic`` wherever float16 is computed with, but under Lightning's ``precision="16-true"``, which has
    none. SageMaker's ``static_loss_scale`` and ``dynamic_loss_scale``."""
    init_scale: float = 65536.0
    """With a dynamic scale: the first one. SageMaker's default is 2**32, which overflows a dozen times first; this is
    PyTorch's."""
    scale_factor: float = 2.0
    """By what a dynamic scale grows and shrinks."""
    scale_window: int = 2000
    """Steps without overflow after which it grows. SageMaker's default is 1000; this is PyTorch's."""
    min_scale: float = 1.0
    """It does not shrink below this."""
    delayed_shift: int = 1
    """Overflows that it takes to make it shrink; each of them skips its step."""
    consecutive_hysteresis: bool = False
    """Whether these have to follow each other directly; otherwise they are counted until the scale grows."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "scale_window", "delayed_shift")
        found += one_of(self, "reduce_dtype", (*typing.get_args(ReduceDtype), None))
        asked = [name for name in ("fp16", "fp16_params") if getattr(self, name)]
        if self.bf16 and asked:
            found.append(f"`{asked[0]}` and `bf16` contradict each other, but both are True. Choose one.")
        return found + self._wrong_scales()

    def _wrong_scales(self) -> list[str]:
        found = []
        scale = self.loss_scale
        if isinstance(scale, str) and scale != "dynamic":
            found.append(f"`loss_scale` must be `dynamic` or a number, but is {scale!r}.")
        for name, value in (("loss_scale", scale), ("init_scale", self.init_scale)):
            if isinstance(value, (int, float)) and not 0 < value < float("inf"):
                found.append(f"`{name}` must be above 0 and finite, but is {value}.")
        if not 1 < self.scale_factor < float("inf"):
            found.append(f"`scale_factor` must be above 1 and finite, but is {self.scale_factor}.")
        if not 0 <= self.min_scale <= self.init_scale:
            found.append(
                f"`min_scale` must be between 0 and `init_scale` ({self.init_scale}), but is {self.min_scale}."
            )
        if self.consecutive_hysteresis and self.delayed_shift == 1:
            found.append(
                "`consecutive_hysteresis=True` has no effect, because one overflow makes the scale shrink. Set "
                "`delayed_shift`, or leave it out."
            )
        if isinstance(scale, (int, float)) and self.rules_given:
            found.append(
                f"{' and '.join(self.rules_given)} contradict `loss_scale={scale}`, which stays as it is. Leave them "
                "out, or set `loss_scale=dynamic`."
            )
        return found

    @property
    def rules_given(self) -> list[str]:
        """Rules of the dynamic scale that are not the default."""
        names = (
            *("init_scale", "scale_factor", "scale_window"),
            *("min_scale", "delayed_shift", "consecutive_hysteresis"),
        )
        defaults = {field.name: field.default for field in dataclasses.fields(PrecisionOptions)}
        return [f"`{name}={getattr(self, name)}`" for name in names if getattr(self, name) != defaults[name]]
