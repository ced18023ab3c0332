"""Monkey patching: temporary replacement of methods of single modules."""

import functools
import types
from collections.abc import Callable
from typing import Any, final

from torch import nn

__all__ = ["Patches"]


@final
class Patches:
    """Active replacements. They are attributes of the instances; the classes are untouched."""

    def __init__(self) -> None:
        # Module, name, and the instance's own attribute of that name, if it had one.
        self._before: list[tuple[nn.Module, str, Any]] = []

    def replace(self, module: nn.Module, method: Callable[..., Any], name: str = "forward") -> None:
        """Redirect calls of ``module.<name>`` to ``method``."""
        original = getattr(module, name)
        self._before.append((module, name, vars(module).get(name)))

        @functools.wraps(original)
        def instead(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if called is not module:
                # A copy of the module (in an average of weights, say) took this method along.
                own = getattr(original, "__func__", getattr(type(called), name))
                return types.MethodType(own, called)(*args, **kwargs)
            return method(*args, **kwargs)

        vars(module)[name] = types.MethodType(instead, module)

    def give_back(self) -> None:
        """Undo all replacements, the latest first."""
        for module, name, own in reversed(self._before):
            if own is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = own
        self._before.clear()
