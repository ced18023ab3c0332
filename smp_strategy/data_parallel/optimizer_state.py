"""Optimizer state of a parameter, converted between the whole parameter and the piece that a rank updates.

``optimizer.state[parameter]`` is a mapping, possibly with lists or mappings in it. Of its tensors some have one value
per element and are cut like the parameter (moments); others are scalars (numbers of steps), which are equal on all
ranks and are copied, with everything that is no tensor. Other tensors (the rows of Adafactor) cannot be cut::

    parameter 5 x 7             piece of 12 elements
    mean      5 x 7     <->     mean       12
    step      ()        <->     step       ()

Shapes tell which is which, unless there is one element only. Then names decide, for which a twin of the optimizer is
probed: for a stand-in of seven elements a moment has seven.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.optimizer_probe import take_step, twin_of
from smp_strategy.errors import UnsupportedError

__all__ = ["cut_state", "has_one_per_element", "kept_per_element"]

_STAND_IN = 7
# Some entries appear later than in the first step: an average over every fifth, say.
NUM_STEPS = 12


def kept_per_element(optimizer: Optimizer, parameter: Tensor) -> dict[str, bool]:
    """Whether each state tensor, by name, has one value per element.

    The result holds for all parameters with the same options, number of dims and dtype. Only for optimizers that can
    update pieces (:mod:`smp_strategy.data_parallel.optimizer_checks`).
    """
    stand_in = nn.Parameter(torch.ones(_STAND_IN, dtype=parameter.dtype))
    twin = twin_of(optimizer, parameter, stand_in)
    for _ in range(NUM_STEPS):
        stand_in.grad = torch.ones_like(stand_in)
        take_step(twin)
    named = _named(twin.state.get(stand_in, {}))
    return {name: leaf.shape == stand_in.shape for name, leaf in named if isinstance(leaf, Tensor)}


def cut_state(
    state: Any, shape: Sequence[int], cut: Callable[[Tensor], Tensor], per_element: Mapping[str, bool]
) -> Any:
    """State of a piece, cut from that of the whole parameter.

    Args:
        state: State of the whole parameter; it is not changed.
        shape: Shape of the parameter.
        cut: Returns the piece of a tensor of this shape, which may have other strides than the parameter: some states
            are copies of gradients.
        per_element: Result of :func:`kept_per_element`.

    Raises:
        UnsupportedError: a tensor has neither one value per element nor one at all.
    """

    def changed(name: str, leaf: object) -> object:
        if isinstance(leaf, Tensor) and has_one_per_element(name, leaf, shape, per_element):
            return cut(leaf).clone()  # it must not keep the whole alive
        return leaf

    _, structure = pytree.tree_flatten(state)
    return pytree.tree_unflatten([changed(name, leaf) for name, leaf in _named(state)], structure)


def has_one_per_element(name: str, leaf: Tensor, shape: Sequence[int], per_element: Mapping[str, bool]) -> bool:
    """Whether a state tensor of a parameter, or of a piece of one, has a value for each of its elements.

    Args:
        name: Name of the tensor in the state.
        leaf: The tensor.
        shape: Shape of the parameter, or of the piece.
        per_element: Result of :func:`kept_per_element`; used if shapes do not tell.

    Raises:
        UnsupportedError: it has neither one value per element nor one at all.
    """
    # A tensor of unknown name that has dims is a moment rather than a number of steps.
    if tuple(leaf.shape) == tuple(shape) and (leaf.numel() != 1 or per_element.get(name, leaf.ndim > 0)):
        return True
    if leaf.numel() != 1:
        raise UnsupportedError(
            f"The optimizer's state has `{name}` of shape {list(leaf.shape)} for what is of shape {list(shape)}. "
            "Pieces of parameters (`sharded_data_parallel_degree`) need one value per element. Use "
            "`shard_optimizer_state=True` with an optimizer that keeps something else; if it does not, this state "
            "is of another model or of another optimizer."
        )
    return False


def _named(state: Any) -> list[tuple[str, object]]:
    """Leaves of ``state``, named by their path: ``mean``, ``averages.0``."""
    found, _ = pytree.tree_flatten_with_path(state)
    return [
        (".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf) for path, leaf in found
    ]
