"""With which names does a model know its weights, that are called otherwise in the checkpoint of what surrounds it?

A LightningModule has the model as an attribute, so its checkpoint says ``model.encoder.weight`` for what the model
calls ``encoder.weight``. Here prefixes are found, taken away and put in front.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from smp_strategy.errors import CheckpointError

__all__ = ["add_prefix", "find_prefix", "strip_prefix"]

_COMPILED: Final = "_orig_mod."


def find_prefix(names: Iterable[str]) -> str:
    """The attribute of a LightningModule that has all of the weights, with a dot at its end.

    Raises:
        CheckpointError: there are several.
    """
    names = list(names)
    found = Counter(f"{name.partition('.')[0]}." if "." in name else name for name in names)
    if len(found) != 1:
        listed = ", ".join(f"`{prefix}` ({number})" for prefix, number in found.most_common(8))
        raise CheckpointError(
            f"Which weights are those of the model cannot be told, as names begin with {listed or 'nothing'}. Say it: "
            f"`--prefix {found.most_common(1)[0][0] if found else 'model.'}`, or `--prefix ''` for all of them."
        )
    [prefix] = found
    return prefix + (_COMPILED if all(name.startswith(prefix + _COMPILED) for name in names) else "")


def strip_prefix(weights: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The weights below ``prefix``, by the rest of their names; and the names of the others.

    Raises:
        CheckpointError: there are none below it.
    """
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        some = ", ".join(f"`{name}`" for name in list(weights)[:3])
        raise CheckpointError(f"No weight has a name that begins with `{prefix}`; there are {some or 'none at all'}.")
    return found, [name for name in weights if not name.startswith(prefix)]


def add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same under names with ``prefix`` in front."""
    return {prefix + name: value for name, value in values.items()}
