"""Cross-stage shape inference: metadata of a result on stages that do not have the operands' values.

Predictions are those of :mod:`smp_strategy.model.trace.shape_inference`. Their cache here ignores the values of floats
and complex numbers, which do not change metadata and may be new in each step (the decay of an average).
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.model.ownership import spec_of
from smp_strategy.model.trace.prediction import Callee, Prediction, Unpredictable
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["CrossStageInference"]

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
# Bound of the cache: shapes may change with every call.
MOST_ANSWERS = 1 << 12


@final
class CrossStageInference:
    """Infers results by metadata, with a cache."""

    def __init__(self, device: torch.device) -> None:
        self._inference = ShapeInference(device)
        self._known: dict[Any, Prediction | Unpredictable] = {}

    def of(self, func: Any, leaves: Sequence[Any], structure: Any) -> Prediction | Unpredictable:
        """Result of ``func`` for flattened arguments."""
        given = [spec_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        keys = [_key(leaf) for leaf in given]
        question = None if any(key is None for key in keys) else (func, structure, *keys)
        found = self._known.get(question)
        if found is None:
            with torch.no_grad():
                found = self._inference.predict(Callee(func, func), given, structure)
            if len(self._known) >= MOST_ANSWERS:
                self._known.clear()
            if question is not None:
                self._known[question] = found
        return found


def _key(leaf: Any) -> Any:
    """Part of an argument that the result depends on; ``None``: unknown."""
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, slice):
        return slice, leaf.start, leaf.stop, leaf.step
    if isinstance(leaf, (float, complex)):
        return type(leaf)
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else None
