"""Parametrized weights that are kept for a while: ``with torch.nn.utils.parametrize.cached():`` in a step.

What is kept stands in a dict of the process. Microbatches that take turns would find each other's weights there, with
each other's graphs behind them; so each has a dict of its own. And its graph is cut where it waits for other stages: a
weight that is used on both sides of a cut enters the later segment as any other value does.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from torch import Tensor
from torch.nn.utils import parametrize

__all__ = ["CachedWeights", "cache_of_now", "uncached"]


@final
class CachedWeights(dict[Any, Any]):
    """The weights that are kept for one microbatch, in place of PyTorch's dict while the microbatch runs.

    Args:
        segment: number of the running segment.
        cross: gives the later segment, which runs, a weight that the numbered one has made.
    """

    def __init__(self, segment: Callable[[], int], cross: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self._segment = segment
        self._cross = cross
        self._depth = 0
        # In which segment each has been made; and those that have entered a later one.
        self._made: dict[Any, int] = {}
        self._entered: dict[Any, tuple[int, Tensor]] = {}
        self._began = 0
        self._outside: tuple[int, dict[Any, Any]] = (0, {})

    def enter(self) -> None:
        """A turn begins."""
        self._outside = parametrize._cache_enabled, parametrize._cache
        self._began = self._segment()
        parametrize._cache_enabled, parametrize._cache = self._depth, self

    def leave(self) -> None:
        """It ends."""
        self._depth, cache = parametrize._cache_enabled, parametrize._cache
        parametrize._cache_enabled, parametrize._cache = self._outside
        if cache is not self:  # what was kept has been thrown away, and perhaps more is kept by now
            self.clear()
            self._made.clear()
            self._entered.clear()
            super().update(cache)
            self._made.update(dict.fromkeys(cache, self._began))

    def __setitem__(self, key: Any, tensor: Tensor) -> None:
        super().__setitem__(key, tensor)
        self._made[key] = self._segment()
        self._entered.pop(key, None)

    def get(self, key: Any, default: Any = None) -> Any:
        """The weight, as the running segment may use it."""
        tensor = super().get(key, default)
        segment = self._segment()
        if tensor is None or not tensor.requires_grad or self._made[key] == segment:
            return tensor
        entered = self._entered.get(key)
        if entered is None or entered[0] != segment:
            entered = self._entered[key] = segment, self._cross(self._made[key], tensor)
        return entered[1]


@contextmanager
def uncached() -> Iterator[None]:
    """In here code finds no weights that are kept, and leaves none."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


def cache_of_now() -> Callable[[], AbstractContextManager[None]]:
    """Opens a context in which the weights are kept that are kept now."""
    depth, kept = parametrize._cache_enabled, dict(parametrize._cache)

    @contextmanager
    def again() -> Iterator[None]:
        before = parametrize._cache_enabled, parametrize._cache
        parametrize._cache_enabled, parametrize._cache = depth, dict(kept)
        try:
            yield
        finally:
            parametrize._cache_enabled, parametrize._cache = before

    return again
