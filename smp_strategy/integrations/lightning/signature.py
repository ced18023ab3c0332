"""The options of the strategy in its signature, for those who ask for it: LightningCLI, ``help()`` and editors.

The strategy takes whatever it is given and says of unknown options what may have been meant. Its signature, though,
names each option with its type and default.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from smp_strategy.config.config import SMPConfig, option_types

__all__ = ["with_options"]


def with_options(init: Callable[..., None]) -> Callable[..., None]:
    """``init``, which takes ``**options``, with a signature that names them."""
    types = option_types()
    signature = inspect.signature(init)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=types[field.name]
        )
        for field in dataclasses.fields(SMPConfig)
    ]
    vars(init)["__signature__"] = signature.replace(parameters=[*own, *options])
    init.__annotations__ |= {option.name: option.annotation for option in options}
    return init


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
