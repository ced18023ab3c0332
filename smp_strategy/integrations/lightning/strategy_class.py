"""Class factory: ``SMPStrategy`` for one of Lightning's two trees, with all options in its signature.

Lightning checks ``isinstance`` against its own classes, and there are two sets of them. The strategy's code therefore
inherits nothing of Lightning's, and is combined with the base class of a tree here, once per tree.

``StrategyHooks`` takes any options and suggests corrections of unknown ones. The signature names each option with its
type and default, for LightningCLI, ``help()`` and editors.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import new_class
from typing import Any

from smp_strategy.config.config import SMPConfig, option_types
from smp_strategy.integrations.lightning.strategy import StrategyHooks
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["make_strategy"]


@functools.cache
def make_strategy(root: str) -> type[StrategyHooks]:
    """The class ``SMPStrategy`` for the Lightning tree ``root``."""
    tree = Tree(root)
    base = tree.pytorch("strategies.parallel").ParallelStrategy
    where = "smp_strategy.integrations.lightning" if root == "lightning.pytorch" else "smp_strategy.pytorch_lightning"
    body = {
        "__init__": _with_options(StrategyHooks.__init__),
        "tree": tree,
        "__module__": where,
        "__doc__": StrategyHooks.__doc__,
    }
    strategy: type[StrategyHooks] = new_class(
        "SMPStrategy", (StrategyHooks, base), exec_body=lambda names: names.update(body)
    )
    return strategy


def _with_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``init``, which takes ``**options``, with a signature that names each option."""

    @functools.wraps(init)
    def named(self: object, *args: Any, **options: Any) -> None:
        init(self, *args, **options)

    types = option_types()
    signature = inspect.signature(init)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=types[field.name]
        )
        for field in dataclasses.fields(SMPConfig)
    ]
    vars(named)["__signature__"] = signature.replace(parameters=[*own, *options])
    named.__annotations__ = init.__annotations__ | {option.name: option.annotation for option in options}
    return named


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
