"""What an optimizer keeps for a parameter: as one process has it, and as a rank has it that updates a piece of it.

``optimizer.state[parameter]`` is a mapping, possibly with lists or mappings in it. Of its tensors some have one value
per element and are cut like the parameter (moments); others are scalars (numbers of steps), which all ranks have alike,
and are copied with everything that is no tensor. Anything else (the rows of Adafactor) cannot be cut::

    parameter 5 x 7             piece of 12 elements
    mean      5 x 7     <->     mean       12
    step      ()        <->     step       ()

Shapes tell which is which, unless there is one element only. Then names count, for which a twin of the optimizer is
asked: for a stand-in of seven elements a moment has seven.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.optim.twin import take_step, twin_of

__all__ = ["InPieces", "cut_state", "join_state", "kept_per_element", "split_state"]

_STAND_IN = 7
# Some entries come later than with the first step: an average over every fifth, say.
NUM_STEPS = 12


@final
@dataclass(frozen=True, kw_only=True)
class InPieces:
    """Stands in a state for a tensor of which every rank has a piece."""

    number: int
    """Which of these tensors it is."""
    dtype: torch.dtype


def kept_per_element(optimizer: Optimizer, parameter: Tensor) -> dict[str, bool]:
    """Of each tensor that is kept, by its name: whether it has one value per element.

    The same for all parameters with the same options, number of dims and dtype. For optimizers that can be given pieces
    (:mod:`smp_strategy.optim.elementwise`).
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
    """The state of a piece, out of that of the whole parameter.

    Args:
        state: of the whole parameter; stays as it is.
        shape: of the parameter.
        cut: gives the piece of a tensor of this shape, whose memory may be laid out otherwise than the parameter's:
            some states are copies of gradients.
        per_element: see :func:`kept_per_element`.

    Raises:
        UnsupportedError: a tensor has neither one value per element nor one at all.
    """
    # What is cut must not keep the whole alive.
    return _changed(state, tuple(shape), per_element, lambda tensor: cut(tensor).clone())


def split_state(state: Any, numel: int, per_element: Mapping[str, bool]) -> tuple[Any, list[Tensor]]:
    """The state of a piece, as what all ranks have alike and what is to be put together.

    Args:
        state: of the piece.
        numel: its elements.
        per_element: see :func:`kept_per_element`.

    Returns:
        The state with an :class:`InPieces` in the place of each tensor that has one value per element, and these
        tensors by their numbers. The former is taken from the first rank that has a part of the parameter: optimizers
        may keep nothing of an empty piece.

    Raises:
        UnsupportedError: a tensor has neither one value per element nor one at all.
    """
    tensors: list[Tensor] = []

    def put_aside(tensor: Tensor) -> InPieces:
        tensors.append(tensor)
        return InPieces(number=len(tensors) - 1, dtype=tensor.dtype)

    return _changed(state, (numel,), per_element, put_aside), tensors


def join_state(state: Any, tensors: Sequence[Tensor]) -> Any:
    """The state of the whole parameter.

    Args:
        state: that of a piece, as :func:`split_state` leaves it.
        tensors: put together out of all pieces, by their numbers.
    """
    return pytree.tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, InPieces) else leaf, state)


def _changed(
    state: Any, shape: tuple[int, ...], per_element: Mapping[str, bool], change: Callable[[Tensor], object]
) -> Any:
    """``state`` with those tensors changed that have one value per element of something with this ``shape``."""

    def changed(name: str, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        # What nobody knows by name is a moment rather than a number of steps if it has dims.
        if leaf.shape == shape and (leaf.numel() != 1 or per_element.get(name, leaf.ndim > 0)):
            return change(leaf)
        if leaf.numel() != 1:
            raise UnsupportedError(
                f"The optimizer's state has `{name}` of shape {list(leaf.shape)} for what is of shape {list(shape)}. "
                "Pieces of parameters (`sharded_data_parallel_degree`) need one value per element. Use "
                "`shard_optimizer_state=True` with an optimizer that keeps something else; if it does not, this state "
                "is of another model or of another optimizer."
            )
        return leaf

    _, structure = pytree.tree_flatten(state)
    return pytree.tree_unflatten([changed(name, leaf) for name, leaf in _named(state)], structure)


def _named(state: Any) -> list[tuple[str, object]]:
    """The leaves of ``state``, named by the way to them: ``mean``, ``averages.0``."""
    found, _ = pytree.tree_flatten_with_path(state)
    return [
        (".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf) for path, leaf in found
    ]
