"""Generation from padded text on several stages, without a cache.

Each stage has the keys and values of its own units (:mod:`smp_strategy.pipeline.carried_objects`). Code above the units
makes masks of the length that the cache reports, for its first layer mostly, which is empty on all stages but one. Text
without padding needs no mask. With padding the cache is left out, which takes longer and gives the same text.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["without_cache"]


def without_cache(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``generate``, without a cache if the text is padded."""
    mask = kwargs.get("attention_mask")
    is_padded = isinstance(mask, Tensor) and not bool(mask.all())
    return {**kwargs, "use_cache": False} if is_padded else dict(kwargs)
