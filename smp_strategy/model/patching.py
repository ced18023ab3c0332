"""Monkey patching: temporary replacement of methods and attributes of single objects, and of their classes."""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, final

__all__ = ["Patches", "subclass_of"]

_ABSENT: Final = object()


def subclass_of(stock: Any, /, *mixins: type, **names: Any) -> Any:
    """Subclass for a single object of the class ``stock``: ``mixins`` come first, and its name shows no difference."""
    own = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (*mixins, stock), {**own, **names})


@final
class Patches:
    """Active replacements. They are attributes of the instances; the classes are untouched.

    A context manager, which undoes them at its end.
    """

    def __init__(self) -> None:
        # Object, name, and the instance's own attribute of that name, if it had one.
        self._before: list[tuple[object, str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def put(self, owner: object, name: str, value: Any) -> None:
        """Set ``owner.<name>`` on the instance, bypassing ``__setattr__``. Copies of ``owner`` keep ``value``."""
        own = vars(owner)
        self._before.append((owner, name, own.get(name, _ABSENT)))
        own[name] = value

    def replace(self, module: Any, method: Callable[..., Any], name: str = "forward") -> None:
        """Redirect calls of ``module.<name>`` to ``method``. Copies of ``module`` call their own method."""
        original = getattr(module, name)

        @functools.wraps(original)
        def instead(called: Any, *args: Any, **kwargs: Any) -> Any:
            if called is not module:
                # A copy of the module (in an average of weights, say) took this method along.
                own = getattr(original, "__func__", getattr(type(called), name))
                return types.MethodType(own, called)(*args, **kwargs)
            return method(*args, **kwargs)

        self.put(module, name, types.MethodType(instead, module))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Context in which they are undone."""
        put = [(owner, name, vars(owner)[name]) for owner, name, _ in self._before]
        self.give_back()
        try:
            yield
        finally:
            for owner, name, value in put:
                self.put(owner, name, value)

    def give_back(self) -> None:
        """Undo all replacements, the latest first."""
        for owner, name, before in reversed(self._before):
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._before.clear()
