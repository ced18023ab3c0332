"""Temporary view of modules as they were before their layers were split.

Code written for whole layers (initialisers) asks modules for their classes and sizes. Parameters are not exchanged
here: the caller provides tensors of the right shape.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import nn

__all__ = ["UnsplitViews"]

_MISSING = object()


@final
class UnsplitViews:
    """Recorded classes and attributes of ``modules``; create it before their layers are split.

    Args:
        modules: Modules that may change.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, type(module), dict(vars(module))) for module in modules]
        self._changes: list[tuple[nn.Module, tuple[type, type], dict[str, tuple[Any, Any]]]] = []

    def compare(self) -> None:
        """Record the changes that the split has made; only these are switched later."""
        for module, kind, before in self._before:
            after = dict(vars(module))
            names = [
                name for name in {**before, **after} if before.get(name, _MISSING) is not after.get(name, _MISSING)
            ]
            if names or type(module) is not kind:
                attributes = {name: (before.get(name, _MISSING), after.get(name, _MISSING)) for name in names}
                self._changes.append((module, (kind, type(module)), attributes))
        self._before = []

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Context in which modules look as before the split."""
        self._show(0)
        try:
            yield
        finally:
            self._show(1)

    def _show(self, which: int) -> None:
        for module, kinds, attributes in self._changes:
            module.__class__ = kinds[which]
            _set(vars(module), {name: values[which] for name, values in attributes.items()})


def _set(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value
