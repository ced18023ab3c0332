"""Modules that look for a moment as they did before their layers were split.

Code that was written for whole layers (their initialisers) asks modules for their classes and their sizes. Parameters
are not exchanged here: whoever shows the rest brings tensors of the right shape.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import nn

__all__ = ["UnsplitViews"]

_MISSING = object()


@final
class UnsplitViews:
    """What ``modules`` look like; made before their layers are split.

    Args:
        modules: those that may change.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, type(module), dict(vars(module))) for module in modules]
        self._changes: list[tuple[nn.Module, tuple[type, type], dict[str, tuple[Any, Any]]]] = []

    def compare(self) -> None:
        """Layers have been split: note what that has changed, which is all that is ever shown otherwise."""
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
        """In here modules look as they did before."""
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
