"""Guarded tensors: tensors that have metadata but, for the time being, no values on this rank.

Parameters of other stages, parameters that rest in shards, parameters whose update is still on its way, and parts of
split layers in a hook keep their identity, because optimizers, schedulers and hooks refer to them. But code that
computes with one of them, such as a hook that clamps weights or ``torch.save(model.state_dict())``, must never get a
plausible number. See [Note: guarded tensors] below.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.tensor_spec import METADATA

__all__ = [
    "BY_IDENTITY",
    "GRADIENT",
    "HARMLESS",
    "SIZES",
    "Guard",
    "GuardedParameter",
    "GuardedTensor",
    "guard_of",
    "in_plain_sight",
    "lend",
    "name_of",
    "placeholder",
    "untracked",
    "unwatch",
    "watch",
]

# [Note: guarded tensors]
# A guarded tensor takes a subclass, as PyTorch's own uninitialised parameters do, and receives every operation on it in
# `__torch_function__`. Its guard answers questions of metadata. Before any other operation it makes the values
# available, after which the tensor is an ordinary one, or it refuses with the name and the remedy. The guards are
#
#     ownership.HomeStages                   values on other stages; hooks compute there, all else is refused
#     data_parallel/parameter_pieces         values in shards; gathered in hooks, else refused
#     data_parallel/zero1                    values on their way; waits for them
#     engine/hooks/full_parameters           part of a split layer in a hook; gathered
#     engine/manual_optimization             gradients while microbatches run; refused
#
# The object is the same all the time: `watch` and `unwatch` exchange its class, which PyTorch allows between Python
# subclasses with the same layout. Guards nest: a hook's view watches parameters that rest.

# Context in which operations reach the memory behind guarded tensors, for code that tells them apart itself.
in_plain_sight: Any = plain_functions


@contextmanager
def untracked() -> Iterator[None]:
    """Touch parameters freely, without autograd; tensors made in inference mode are ordinary ones all the same."""
    with torch.inference_mode(False), torch.no_grad(), in_plain_sight():
        yield


# Attribute of a guarded tensor that holds its `_Guarded`.
_GUARD = "_smp_guard"


def _accessors(*names: str) -> frozenset[Any]:
    """Methods of Tensor, and the getters and setters of its properties."""
    found = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    parts = [
        getattr(entry, part) for entry in found for part in ("__get__", "__set__", "__delete__") if hasattr(entry, part)
    ]
    return frozenset([*found, *parts])


GRADIENT = _accessors("grad")
_GRAD: Any = Tensor.grad  # a descriptor
_get_grad = _GRAD.__get__
# Operations that use their arguments only to identify parameters.
BY_IDENTITY: frozenset[Any] = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
# Operations that neither need nor reveal values: the state of autograd and bookkeeping of optimizers.
HARMLESS = METADATA | _accessors(
    *("requires_grad", "requires_grad_", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_version"),
    *("_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "is_shared"),
    *("register_post_accumulate_grad_hook", "untyped_storage", "__hash__", "__dir__", "grad_dtype"),
)
# Operations that return sizes, which are those of a part while a parameter is sharded.
SIZES = frozenset({torch.numel}) | _accessors(
    *("shape", "nbytes", "size", "stride", "numel", "nelement", "is_contiguous", "is_same_size", "__len__"),
    *("untyped_storage", "storage_offset"),
)


class Guard:
    """Reaction to the use of the tensors it guards. Subclasses make values available, or say why they cannot."""

    free: frozenset[Any] = HARMLESS | BY_IDENTITY
    """Operations that are no use."""

    @property
    def can_lift(self) -> bool:
        """Whether :meth:`lift` can make the values available now."""
        return True

    def ask(self) -> bool:
        """Ask for the values outside of hooks; returns whether they are there for a while. See :func:`lend`."""
        return False

    def lift(self) -> None:
        """Give the guarded tensors their values, and end their guard."""
        raise NotImplementedError

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for ``operation``, which needs the values while they cannot be made available."""
        raise NotImplementedError

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation on guarded tensors."""
        if func not in self.free:
            if self.can_lift:
                self.lift()
                return func(*args, **kwargs)
            if func not in GRADIENT:
                if self.ask():
                    return func(*args, **kwargs)
                raise self.refusal(name_of(func))
        with in_plain_sight():
            return func(*args, **kwargs)

    def copy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        self._lift_for("copy.deepcopy")
        copied: Tensor = copy.deepcopy(tensor, memo)
        return copied

    def pickle(self, tensor: Tensor, protocol: Any) -> Any:
        """Reduced value of ``tensor``, as by ``__reduce_ex__``."""
        self._lift_for("pickle")
        return tensor.__reduce_ex__(protocol)

    def describe(self, tensor: Tensor) -> str:
        """Text form of ``tensor``."""
        self._lift_for("repr")
        return repr(tensor)

    def _lift_for(self, operation: str) -> None:
        if self.can_lift:
            self.lift()
        elif not self.ask():
            raise self.refusal(operation)


class _Guarded(NamedTuple):
    """State of a guarded tensor."""

    guard: Guard
    kind: type[Tensor]
    """Class before the guard."""
    outer: "_Guarded | None"
    """State before the guard, if the tensor was guarded already."""


class GuardedTensor(Tensor):
    """A guarded buffer, or any other guarded tensor that is no parameter; see [Note: guarded tensors]."""

    # Placed tensors leave operations that involve a guarded tensor to this class.
    is_guarded = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _first_guard(args, kwargs or {}).call(func, args, kwargs or {})

    @property
    def grad(self) -> Tensor | None:
        """Its gradient. A short path, since optimizers ask for it twice per step, of all parameters."""
        guard = vars(self)[_GUARD].guard
        if guard.can_lift and _get_grad not in guard.free:
            return _get_grad(self)  # arrives in `__torch_function__`
        with in_plain_sight():
            return _get_grad(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _guard(self).copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _guard(self).pickle(self, protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return _guard(self).describe(self)


class GuardedParameter(GuardedTensor, nn.Parameter):
    """A guarded parameter; see [Note: guarded tensors]."""


def watch(tensor: Tensor, guard: Guard) -> None:
    """Guard ``tensor``: operations on it go to ``guard``."""
    state = vars(tensor)
    state[_GUARD] = _Guarded(guard, type(tensor), state.get(_GUARD))
    tensor.__class__ = GuardedParameter if isinstance(tensor, nn.Parameter) else GuardedTensor


def lend(tensor: Tensor, value: Tensor) -> Callable[[], None]:
    """Make a guarded tensor an ordinary one with ``value``; returns what ends that."""
    state, kind = vars(tensor), type(tensor)
    guarded: _Guarded = state.pop(_GUARD)
    own = guarded
    while own.outer is not None:
        own = own.outer
    with in_plain_sight():
        data = tensor.data
    tensor.__class__ = own.kind
    tensor.data = value

    def end() -> None:
        tensor.data = data
        tensor.__class__ = kind
        state[_GUARD] = guarded

    return end


def unwatch(tensor: Tensor) -> None:
    """End the innermost guard of ``tensor``."""
    guarded: _Guarded = vars(tensor).pop(_GUARD)
    tensor.__class__ = guarded.kind
    if guarded.outer is not None:
        vars(tensor)[_GUARD] = guarded.outer


def guard_of(tensor: Any) -> Guard | None:
    """Innermost guard of ``tensor``; ``None``: it is not guarded."""
    return _guard(tensor) if isinstance(tensor, GuardedTensor) else None


def placeholder(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a tensor without values: a single element, expanded to ``size``.

    NaN where possible: kernels that read memory without going through Python's dispatch must not compute with a
    plausible number.
    """
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((1,) * len(size), fill, dtype=dtype, device=device).expand(size)


def _first_guard(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guard:
    for leaf in args:
        if isinstance(leaf, GuardedTensor):
            return _guard(leaf)
    return next(_guard(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, GuardedTensor))


def _guard(tensor: GuardedTensor) -> Guard:
    guard: Guard = vars(tensor)[_GUARD].guard
    return guard


def name_of(func: Any) -> str:
    """The user's name for an operation that arrives in ``__torch_function__``."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name
