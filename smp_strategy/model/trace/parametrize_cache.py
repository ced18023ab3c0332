"""Cache of parametrized weights per microbatch, for ``with torch.nn.utils.parametrize.cached():`` in a step.

PyTorch has one cache in the process. Interleaved microbatches would find each other's weights there, with each other's
autograd graphs, so each has a cache of its own. The graph of a microbatch is cut into segments where it waits for other
stages: a cached weight enters a later segment as any other value does.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from torch import Tensor
from torch.nn.utils import parametrize

__all__ = ["CachedWeights", "cache_of_now", "uncached"]


@final
class CachedWeights(dict[Any, Any]):
    """Cached weights of one microbatch; replaces PyTorch's dict while the microbatch runs.

    Args:
        segment: Returns the number of the running segment.
        cross: Takes a segment and a weight that was made in it, and returns the weight as the running segment uses it.
    """

    def __init__(self, segment: Callable[[], int], cross: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self._segment = segment
        self._cross = cross
        self._depth = 0
        # Segment in which each weight was made; and weights that have entered a later segment.
        self._made: dict[Any, int] = {}
        self._entered: dict[Any, tuple[int, Tensor]] = {}
        self._began = 0
        self._outside: tuple[int, dict[Any, Any]] = (0, {})

    def enter(self) -> None:
        """Begin a turn of the microbatch: become PyTorch's cache."""
        self._outside = parametrize._cache_enabled, parametrize._cache
        self._began = self._segment()
        parametrize._cache_enabled, parametrize._cache = self._depth, self

    def leave(self) -> None:
        """End the turn: PyTorch gets its own cache back."""
        self._depth, cache = parametrize._cache_enabled, parametrize._cache
        parametrize._cache_enabled, parametrize._cache = self._outside
        if cache is not self:  # `cached()` was left, and perhaps entered again, during the turn
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
    """Run with an empty cache, and discard it afterwards."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


def cache_of_now() -> Callable[[], AbstractContextManager[None]]:
    """Capture the cache; the result opens contexts with the same content."""
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
