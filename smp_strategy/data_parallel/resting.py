"""Class of a sharded parameter while its whole values are not there; see [Note: resting parameters]."""

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

# [Note: resting parameters]
#
# A sharded parameter is one object for its whole life, because user code, optimizers and hooks hold it. Its memory and
# its class change:
#
#     state       class               memory                        from .. to
#     resting     RestingParameter    a single NaN, expanded        otherwise
#     gathered    its own             view of the gathered buffer   wait .. free: forward and backward
#     piece       its own             this rank's elements, 1-D     show_pieces .. hide_pieces: optimizer
#     whole       its own             memory of its own             show_whole .. hide_whole: hooks of the user
#
# Code that computes with a resting parameter (code above the units, a function called outside of steps,
# `copy.deepcopy(model)`) must not get a plausible number. So the class answers questions of metadata, as parameters of
# other stages do (`smp_strategy.model.guarded_tensors`), and for all other operations
#   * while a hook of the user runs, the first use makes all parameters whole (collective: the hook runs on all ranks,
#     and the first use on one is the first on all);
#   * otherwise it raises.
# The class is swapped, not the object, as `Tensor.__class__` can be assigned between Python subclasses with the same
# layout. The NaN is for kernels that read memory without going through Python's dispatch.

# Attribute of a parameter that holds its `OnUse`.
_ON_USE = "_smp_on_use"


@final
@dataclass
class OnUse:
    """Reaction to the use of a resting parameter.

    Attributes:
        make_whole: Gives all parameters their values; ``None``: the use is refused.
        sizes: Whether asking for a size counts as a use: a whole parameter has another size.
    """

    make_whole: Callable[[], None] | None = None
    sizes: bool = False

    def watch(self, parameter: nn.Parameter) -> None:
        """Apply to uses of ``parameter`` from now on."""
        setattr(parameter, _ON_USE, self)


@final
class RestingParameter(nn.Parameter):
    """Sharded parameter without values. Never constructed: parameters take this class and leave it again."""

    # Placed tensors leave operations that involve such a tensor to this class.
    has_home = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HARMLESS or func in BY_IDENTITY:
            # Before the metadata is read, since the class and the shape change with it.
            if func in SIZES:
                _become_whole_for_sizes(args)
            with in_plain_sight():
                return func(*args, **(kwargs or {}))
        resting = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RestingParameter))
        if _become_whole(resting):
            return func(*args, **(kwargs or {}))
        # After `_become_whole`: in a hook `.grad` has to be whole as well, elsewhere it is the piece.
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
    """Make all parameters whole if user code may see them now; ``parameter`` is an ordinary one afterwards."""
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
    """Memory of ``parameter`` while it rests: one NaN (or zero, if integral), expanded to its shape."""
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
