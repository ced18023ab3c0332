"""Precision options: compute dtype, dtype of gradient reductions, and loss scaling."""

import dataclasses
import typing
from typing import Literal

from smp_strategy.config.parsing import at_least_one, one_of

__all__ = ["GradientDtype", "PrecisionOptions"]

ReduceDtype = Literal["float32", "bfloat16", "float16"]
GradientDtype = Literal["float32", "parameter"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Compute precision, unless Lightning or Accelerate choose it."""

    fp16: bool = False
    """Units compute in float16, with loss scaling, on float32 master weights."""
    bf16: bool = False
    """Units compute in bfloat16, on float32 master weights. SageMaker has this with sharding only."""
    fp16_params: bool = False
    """Parameters themselves are float16, without float32 master weights. Units compute in float16."""
    gradient_dtype: GradientDtype = "float32"
    """Dtype in which gradients of half-precision parameters are added up, over microbatches, batches and ranks.
    ``float32``: digits of a sum are not lost because a batch was cut. ``parameter``: that of the parameter, bit for bit
    as PyTorch accumulates. Parameters in float32 (masters) have float32 gradients either way."""
    reduce_dtype: ReduceDtype | None = None
    """Dtype of gradient reductions over replicas and shard groups. ``None``: the dtype in which each rank accumulates
    gradients; see ``gradient_dtype``."""
    loss_scale: int | float | str | None = None
    """Factor on the loss that keeps float16 gradients from underflow: ``dynamic``, or a constant number. ``None``:
    ``dynamic`` whenever units compute in float16, except under Lightning's ``precision="16-true"``, which has none.
    SageMaker's ``static_loss_scale`` and ``dynamic_loss_scale``."""
    init_scale: float = 65536.0
    """Initial dynamic scale. SageMaker's default is 2**32, which overflows a dozen times first; this is PyTorch's."""
    scale_factor: float = 2.0
    """Factor by which a dynamic scale grows and shrinks."""
    scale_window: int = 2000
    """Steps without overflow after which a dynamic scale grows. SageMaker's default is 1000; this is PyTorch's."""
    min_scale: float = 1.0
    """Lower limit of a dynamic scale."""
    delayed_shift: int = 1
    """Number of overflows after which a dynamic scale shrinks; each of them skips its step."""
    consecutive_hysteresis: bool = False
    """Whether these overflows must follow each other directly; otherwise they are counted until the scale grows."""

    def _problems(self) -> list[str]:
        found = at_least_one(self, "scale_window", "delayed_shift")
        found += one_of(self, "gradient_dtype", typing.get_args(GradientDtype))
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
        if isinstance(scale, (int, float)) and (rules := self.scaling_asked[1:]):
            found.append(
                f"{' and '.join(rules)} contradict `loss_scale={scale}`, which stays as it is. Leave them "
                "out, or set `loss_scale=dynamic`."
            )
        return found

    @property
    def scaling_asked(self) -> list[str]:
        """Options of the scale of the loss that differ from their defaults, ``loss_scale`` first."""
        names = (
            *("loss_scale", "init_scale", "scale_factor", "scale_window"),
            *("min_scale", "delayed_shift", "consecutive_hysteresis"),
        )
        defaults = {field.name: field.default for field in dataclasses.fields(PrecisionOptions)}
        return [f"`{name}={getattr(self, name)}`" for name in names if getattr(self, name) != defaults[name]]
