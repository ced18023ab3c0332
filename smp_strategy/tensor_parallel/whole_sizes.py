"""Whole sizes of split parameters between runs, for set-up code that looks at shapes and has no use for values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor

from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import Guard, in_plain_sight, placeholder, unwatch, watch
from smp_strategy.tensor_parallel.parameter_parts import ParameterParts

__all__ = ["whole_sizes"]


@contextmanager
def whole_sizes(parts: ParameterParts) -> Iterator[None]:
    """Context in which split parameters have the sizes from before the split; uses of their values are refused."""
    values: dict[Any, Tensor] = {}
    guard = _WholeSizes()
    for parameter in parts.cuts:
        with in_plain_sight():
            values[parameter] = parameter.data
            shape = tuple(parts.whole_shape(parameter))
            parameter.data = placeholder(shape, parameter.dtype, parameter.device)
        watch(parameter, guard)
    try:
        yield
    finally:
        for parameter, value in values.items():
            unwatch(parameter)
            with in_plain_sight():
                parameter.data = value


@final
class _WholeSizes(Guard):
    @property
    def can_lift(self) -> bool:
        """Never: values are parts, in memory of their own."""
        return False

    def describe(self, tensor: Tensor) -> str:
        """Shape of the whole ``tensor``."""
        return f"Parameter({list(tensor.shape)}, split over ranks)"

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation that needs values."""
        words = door_words()
        return UnsupportedError(
            f"`{operation}` needs the values of a parameter that the last run has left split over ranks "
            f"(`tensor_parallel_degree`). Compute with it in a step, or {words.in_hook}; to have the whole model after "
            'a run, set `restore_module="all"`.'
        )
