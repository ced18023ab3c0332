"""A parameter that is spread over ranks, while nobody uses it.

It keeps its identity, shape and dtype, but this rank has a piece of its values only. Whatever computes with it, be it
code above the units, a function that is called outside of steps, or ``copy.deepcopy(model)``, must not get a plausible
number. So it changes its class until its values are there, as parameters of other stages do
(:mod:`smp_strategy.model.guarded_tensors`): questions of metadata are answered. For the rest there are two cases:

* while a hook of the user runs, the first use on a rank, which is one on all ranks, makes all parameters whole;
* otherwise it is refused.

Its memory holds a single NaN, for what passes no Python.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import BY_IDENTITY, GRADIENT, HARMLESS, SIZES, in_plain_sight, name_of

__all__ = ["OnUse", "RestingParameter", "placeholder"]

# Where it is noted on a parameter what its use leads to.
_ON_USE = "_smp_on_use"


@final
@dataclass
class OnUse:
    """What the use of a resting parameter leads to.

    Attributes:
        make_whole: gives all parameters their values; ``None``: the use is refused.
        sizes: whether to ask for a size is a use, too: that of a whole parameter is another one.
    """

    make_whole: Callable[[], None] | None = None
    sizes: bool = False

    def watch(self, parameter: nn.Parameter) -> None:
        """Be in charge of ``parameter``."""
        setattr(parameter, _ON_USE, self)


@final
class RestingParameter(nn.Parameter):
    """See the module docstring. Never constructed: parameters take this class and leave it again."""

    # Placed tensors leave operations that involve such a tensor to this class.
    has_home = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HARMLESS or func in BY_IDENTITY:
            if func in SIZES:
                _become_whole_for_sizes(args)
            with in_plain_sight():
                return func(*args, **(kwargs or {}))
        resting = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RestingParameter))
        if _become_whole(resting):
            return func(*args, **(kwargs or {}))
        if func not in GRADIENT:
            raise _refusal(name_of(func))
        with in_plain_sight():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not _become_whole(self):
            raise _refusal("copy.deepcopy")
        copied: Tensor = copy.deepcopy(self, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _become_whole(self):
            raise _refusal("pickle")
        return self.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"RestingParameter({list(self.shape)}, spread over ranks)"


def _become_whole(parameter: RestingParameter) -> bool:
    """Make the parameters whole, if code of the user may see them now: ``parameter`` is an ordinary one then."""
    on_use: OnUse | None = vars(parameter).get(_ON_USE)
    if on_use is None or on_use.make_whole is None:
        return False
    on_use.make_whole()
    return True


def _become_whole_for_sizes(args: tuple[Any, ...]) -> None:
    for leaf in args:
        if isinstance(leaf, RestingParameter) and (on_use := vars(leaf).get(_ON_USE)) is not None and on_use.sizes:
            _become_whole(leaf)


def placeholder(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """What is in the memory of ``parameter`` while it rests."""
    fill = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    one = torch.full((1,) * parameter.ndim, fill, dtype=parameter.dtype, device=device)
    return one.expand(parameter.shape)


def _refusal(operation: str) -> UnsupportedError:
    return UnsupportedError(
        f"`{operation}` needs the values of a parameter that is spread over ranks (`sharded_data_parallel_degree`) and "
        "is not in use. Compute with it in the module that has it, or in a hook of Lightning or "
        "`accelerator.smp.with_weights(lambda: ...)` on all ranks, where weights are whole; "
        "to save the model, call `trainer.save_checkpoint` or `accelerator.get_state_dict(model)` on all ranks; to "
        'have the whole model after a run, leave `restore_module` at "all".'
    )
