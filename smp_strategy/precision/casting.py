"""Arguments of a call in another dtype: floating-point tensors, also those in nests of containers.

Code may change what it is given. A list that it appends to gets the new items, though it was given another list, with
cast tensors in it. A change in place of a tensor that was cast would reach the cast one only: that is refused. And code
may ask whether two arguments are the same (attention asks of queries and keys): a tensor that comes twice is cast once.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.precision.dtypes import FLOATS

__all__ = ["Casting"]

# Asked for first, because most arguments are of these.
_PLAIN = frozenset({type(None), bool, int, float, str})


@final
class Casting:
    """The arguments of one call.

    Args:
        dtype: what floating-point tensors are cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # By identity of the tensor that was given, and with the version that it began with.
        self._cast: dict[int, tuple[Tensor, int]] = {}
        self._after: list[Callable[[], None]] = []

    def of(self, value: Any) -> Any:
        """``value``, all arguments, or, where it holds tensors to be cast, one like it."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, dict):
            return self._of_dict(value)
        if kind is list:
            return self._of_list(value)
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(item is before for item, before in zip(items, value, strict=True)):
                return value
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._of_dataclass(value)
        return value

    def finish(self, name: str) -> None:
        """The call is over.

        Args:
            name: of what was called.

        Raises:
            UnsupportedError: it has changed an argument in place that was cast.
        """
        for cast, version in self._cast.values():
            if _version_of(cast) != version:
                raise UnsupportedError(
                    f"`{name}` changes an argument of shape {list(cast.shape)} in place, which was cast to "
                    f"{self._dtype} for it (`bf16`, `fp16`), so that its caller would not see the change. Return a "
                    f"new tensor, or give it a tensor in {self._dtype}."
                )
        for put_back in self._after:
            put_back()

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is self._dtype or tensor.dtype not in FLOATS:
            return tensor
        if id(tensor) not in self._cast:
            cast = tensor.to(self._dtype)
            self._cast[id(tensor)] = cast, _version_of(cast)
        return self._cast[id(tensor)][0]

    def _of_list(self, given: list[Any]) -> list[Any]:
        before = [self.of(item) for item in given]
        if all(item is old for item, old in zip(before, given, strict=True)):
            return given
        known = {id(item): old for item, old in zip(before, given, strict=True)}
        now = list(before)

        def put_back() -> None:
            if len(now) != len(before) or any(item is not old for item, old in zip(now, before, strict=True)):
                given[:] = [known.get(id(item), item) for item in now]

        self._after.append(put_back)
        return now

    def _of_dict(self, given: dict[Any, Any]) -> dict[Any, Any]:
        before = {key: self.of(item) for key, item in given.items()}
        changed = [key for key, item in given.items() if before[key] is not item]
        if not changed:
            return given
        now = copy.copy(given)  # of its own kind
        for key in changed:
            now[key] = before[key]

        def put_back() -> None:
            for key in before.keys() - now.keys():
                del given[key]
            given.update((key, item) for key, item in now.items() if key not in before or item is not before[key])

        self._after.append(put_back)
        return now

    def _of_dataclass(self, given: Any) -> Any:
        names = [field.name for field in dataclasses.fields(given) if hasattr(given, field.name)]
        items = {name: getattr(given, name) for name in names}
        changed = {name: new for name, item in items.items() if (new := self.of(item)) is not item}
        if not changed:
            return given
        made = copy.copy(given)
        for name, item in changed.items():
            object.__setattr__(made, name, item)
        return made


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
