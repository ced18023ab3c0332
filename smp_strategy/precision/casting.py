"""Casting the arguments of a unit: floating-point tensors get another dtype, in nested containers too.

Code may change its arguments. A list that it appends to gets the new items, although it was given another list with the
cast tensors. An in-place change of a cast tensor would be lost, so it is refused. Code may also ask whether two
arguments are the same object (attention asks of queries and keys): a tensor that occurs twice is cast once.
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

# Checked first, because most arguments have these types.
_PLAIN = frozenset({type(None), bool, int, float, str})


@final
class Casting:
    """Casts of the arguments of one call.

    Args:
        dtype: Target dtype of floating-point tensors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # By id of the original tensor: the cast tensor and its initial version.
        self._cast: dict[int, tuple[Tensor, int]] = {}
        self._after: list[Callable[[], None]] = []

    def of(self, value: Any) -> Any:
        """``value``, which holds all arguments, itself, or a copy of it where it holds tensors to be cast."""
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
        """End of the call: write changes of containers back.

        Args:
            name: Name of the unit.

        Raises:
            UnsupportedError: The call has changed a cast argument in place.
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
