"""Names of parameters in checkpoints: numbers of optimizers, prefixes of LightningModules, tied weights.

[Note: parameter numbers] PyTorch saves the state of an optimizer by numbers, in the order in which its groups have the
parameters; the model's state dict has names, in the order of the modules, with buffers and further names of tied
parameters in between. Some files have both: optimizers made with ``named_parameters()`` save ``param_names``. For
others, the shapes of the state decide, if a group's parameters can be found in the order of the modules in one way
only::

    state dict   embedding [9, 4]   weight [4, 4]   running_mean [4]   bias [4]
    group 0      [9, 4]             [4, 4]                                       one way
    group 1                                         [4]                          two ways: refused

Prefixes: a LightningModule has the model as an attribute, so its checkpoint has ``model.encoder.weight`` for the
model's ``encoder.weight``. Prefixes are found, removed and added.

Tied weights: exchange formats leave out further names, and a module wants to find them. Hugging Face saves
``shared.weight`` only; the module's state dict has ``lm_head.weight``, too.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.errors import CheckpointError

__all__ = [
    "NAMES",
    "Shape",
    "add_prefix",
    "add_tied",
    "find_parameters",
    "find_prefix",
    "named_groups",
    "numbered_groups",
    "strip_prefix",
]

Shape = tuple[int, ...]
# Key of a group: names that are known from elsewhere.
NAMES: Final = "smp_strategy/names"


def find_parameters(shapes: Sequence[Shape | None], weights: Mapping[str, Shape]) -> list[str] | None:
    """Names of a group's parameters, if they can be found in one way only. See [Note: parameter numbers].

    Args:
        shapes: Shapes of the group's parameters, in their order; ``None``: not known.
        weights: Shapes of all weights in the state dict that may be parameters, in its order.

    Returns:
        One name for each, ``None`` if there is no way, or there are several.
    """
    items = list(weights.items())
    first = _leftmost(shapes, items)
    last = _leftmost(list(reversed(shapes)), list(reversed(items)))
    # Greedy matches from the left and from the right are equal exactly if there is only one match.
    if first is None or last is None or first != list(reversed(last)):
        return None
    return first


def _leftmost(shapes: Sequence[Shape | None], items: Sequence[tuple[str, Shape]]) -> list[str] | None:
    found: list[str] = []
    for name, shape in items:
        if len(found) < len(shapes) and shapes[len(found)] in (None, shape):
            found.append(name)
    return found if len(found) == len(shapes) else None


def named_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[Any, Shape | None], weights: Mapping[str, Shape]
) -> tuple[list[list[str]] | None, bool]:
    """Names of the parameters of each group.

    Args:
        groups: ``optimizer.state_dict()["param_groups"]``.
        shapes: Shapes by the number of a parameter, where its state tells it.
        weights: See :func:`find_parameters`.

    Returns:
        The names, ``None`` if they cannot be told; and whether they were found by their shapes.
    """
    found: list[list[str]] = []
    is_guess = False
    for group in groups:
        numbers = list(group["params"])
        if all(isinstance(number, str) for number in numbers):
            names: list[str] | None = numbers
        elif (given := group.get(NAMES, group.get("param_names"))) is not None and len(given) == len(numbers):
            names = [str(name) for name in given]
        else:
            names, is_guess = find_parameters([shapes.get(number) for number in numbers], weights), True
        if names is None:
            return None, True
        found.append(names)
    every = [name for names in found for name in names]
    if len(set(every)) != len(every) or not set(every) <= weights.keys():
        return None, is_guess
    return found, is_guess


def numbered_groups(groups: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Groups with PyTorch's numbers, and the number of each name."""
    numbers: dict[str, int] = {}
    numbered = []
    for group in groups:
        own = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        numbered.append({**group, "params": own})
    return numbered, numbers


_COMPILED: Final = "_orig_mod."


def find_prefix(names: Iterable[str]) -> str:
    """Attribute of a LightningModule that has all of the weights, with a dot at its end.

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
    """Weights whose names begin with ``prefix``, without it; and the names of the others.

    Raises:
        CheckpointError: no name begins with it.
    """
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        some = ", ".join(f"`{name}`" for name in list(weights)[:3])
        raise CheckpointError(f"No weight has a name that begins with `{prefix}`; there are {some or 'none at all'}.")
    return found, [name for name in weights if not name.startswith(prefix)]


def add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values under names with ``prefix`` in front."""
    return {prefix + name: value for name, value in values.items()}


def add_tied(weights: dict[str, Any], like: Mapping[str, LazyTensor]) -> list[str]:
    """Add further names of tied weights, as ``like``, a checkpoint of the same model, has them.

    Returns:
        A remark for each name that was added.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in like.items():
        if tensor.memory is not None:
            groups.setdefault(tensor.memory, []).append(name)
    said = []
    for names in groups.values():
        there = [name for name in names if isinstance(weights.get(name), LazyTensor)]
        if not there or len(there) == len(names):
            continue
        first = there[0]
        shared = replace(weights[first], memory=weights[first].memory or ("tied", first))
        weights[first] = shared
        for name in names:
            if name not in weights:
                weights[name] = shared
                said.append(f"`{name}` was added: it is tied to `{first}`.")
    return said
