"""Which parameter is number 3 of an optimizer?

PyTorch saves the state of an optimizer by numbers, in the order in which its groups have the parameters; the model's
state dict has names, in the order of the modules, with buffers and further names of tied parameters in between. Some
files have both: optimizers that were made with ``named_parameters()`` save ``param_names``. For the others, the shapes
of what is kept decide, if there is one way only to find a group's parameters in the order of the modules::

    state dict   embedding [9, 4]   weight [4, 4]   running_mean [4]   bias [4]
    group 0      [9, 4]             [4, 4]                                       one way
    group 1                                         [4]                          two ways: refused
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["NAMES", "Shape", "find_parameters", "named_groups", "numbered_groups"]

Shape = tuple[int, ...]
# Of a group: names that are known from elsewhere.
NAMES: Final = "smp_strategy/names"


def find_parameters(shapes: Sequence[Shape | None], weights: Mapping[str, Shape]) -> list[str] | None:
    """The names of a group's parameters, if they can be found in one way only.

    Args:
        shapes: of the group's parameters, in their order; ``None``: not known.
        weights: the shapes of everything in the state dict that may be a parameter, in its order.

    Returns:
        One name for each, ``None`` if there is no way, or there are several.
    """
    items = list(weights.items())
    first = _leftmost(shapes, items)
    last = _leftmost(list(reversed(shapes)), list(reversed(items)))
    # The first possible place of each and the last possible one: equal for all exactly if there is one way.
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
    """The names of the parameters of each group.

    Args:
        groups: as in ``optimizer.state_dict()["param_groups"]``.
        shapes: by the number of a parameter, where its state tells it.
        weights: see :func:`find_parameters`.

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
    """Groups with numbers as PyTorch gives them, and the number of each name."""
    numbers: dict[str, int] = {}
    numbered = []
    for group in groups:
        own = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        numbered.append({**group, "params": own})
    return numbered, numbers
