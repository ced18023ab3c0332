"""Guarded tensors: parameters and buffers of other stages, which have metadata here but no values.

After the partition a rank has values for the units of its own stage only. The parameters of other stages keep their
identity (optimizers, schedulers and hooks refer to them), but code that computes with one of them here, such as a hook
that clamps weights or ``torch.save(model.state_dict())``, must never get a plausible number.

So its class is exchanged, as for PyTorch's own uninitialised parameters: see [Note: guarded parameters] below.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.metadata_ops import METADATA

__all__ = [
    "BY_IDENTITY",
    "GRADIENT",
    "HARMLESS",
    "SIZES",
    "HomeStages",
    "HookAccess",
    "StageParameter",
    "StageTensor",
    "home_of",
    "in_plain_sight",
    "name_of",
]

# [Note: guarded parameters]
# A guarded tensor has a subclass of its own, is backed by a single element, and receives every operation on it in
# `__torch_function__`. Questions of metadata are answered. All other operations are
#
# * carried out where the values are, while a hook of the user runs: then tensors that *are* here change their class,
#   too, and their operations go to the view of that hook (`engine/hooks/cross_stage.py`);
# * refused with the name, the stage and the remedy at any other time.
#
# When the values come back, the tensor gets its class back and is an ordinary one again. The object is the same all the
# time; only its class and its `data` change.

# Context in which operations reach the memory behind guarded tensors, for code that tells them apart itself.
in_plain_sight: Any = torch._C.DisableTorchFunctionSubclass

# Attribute of a guarded tensor that holds its `HomeStages`.
_HOME = "_smp_home"


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


@final
@dataclass
class HookAccess:
    """Handlers of operations on guarded tensors, exchanged as hooks of the user begin and end.

    Attributes:
        call: Carries out an operation where the values are; ``None``: operations are refused.
        copy: Makes an independent tensor with the same home; set together with ``call``.
        make_whole: Called before a size is returned, where sizes are those of shards.
    """

    call: Callable[[Any, Any, Any], Any] | None = None
    copy: Callable[["StageTensor"], Tensor] | None = None
    make_whole: Callable[[], None] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class HomeStages:
    """Placement of a tensor, seen from one rank."""

    name: str
    """Qualified name in the module."""
    holders: frozenset[int]
    """Stages that have its values."""
    stage: int
    """Stage of this rank."""
    kind: type[Tensor]
    """Class of the ordinary tensor."""
    stride: tuple[int, ...]
    """Memory layout where the values are."""
    sight: HookAccess
    """Shared by all tensors of a module."""

    @property
    def is_here(self) -> bool:
        """Whether this rank has the values."""
        return self.stage in self.holders

    def refuse(self, operation: str) -> UnsupportedError:
        """Error for an operation that needs the values."""
        stages = " and ".join(str(stage) for stage in sorted(self.holders))
        return UnsupportedError(
            f"`{operation}` needs the values of `{self.name}`, which are on stage {stages} and not on stage "
            f"{self.stage}, that of this rank. Compute with it in a step, in a hook of Lightning, or in "
            "`accelerator.smp.with_weights(lambda: ...)` on all ranks; to save the model, "
            "call `trainer.save_checkpoint` or `accelerator.get_state_dict(model)` on all ranks; to have the whole "
            'model after a run, leave `restore_module` at "all".'
        )


class StageTensor(Tensor):
    """A guarded buffer, or any other guarded tensor that is no parameter; see [Note: guarded parameters]."""

    # Placed tensors leave operations that involve a guarded tensor to this class.
    has_home = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in HARMLESS:
            home = _first_home(args, kwargs or {})
            if home.sight.call is not None:
                return home.sight.call(func, args, kwargs or {})
            if func not in GRADIENT:
                raise home.refuse(name_of(func))
        elif func in SIZES and (make_whole := _first_home(args, kwargs or {}).sight.make_whole) is not None:
            make_whole()
        with in_plain_sight():
            return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:
        """Its gradient. A short path, since optimizers ask for it twice per step, of all parameters."""
        home: HomeStages = vars(self)[_HOME]
        if home.sight.call is not None:
            return _get_grad(self)
        with in_plain_sight():
            return _get_grad(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        home = _home(self)
        if home.sight.copy is None:
            raise home.refuse("copy.deepcopy")
        if id(self) not in memo:
            memo[id(self)] = home.sight.copy(self)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _home(self).refuse("pickle")

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        home = _home(self)
        return f"{home.kind.__name__}({home.name}: {list(self.shape)} on stage {sorted(home.holders)})"

    @staticmethod
    def send_away(tensor: Tensor, home: HomeStages) -> None:
        """Free the memory of ``tensor`` and guard it."""
        # NaN where possible: code that gets past the guard must not compute with a plausible number.
        fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        one = torch.full((1,) * tensor.ndim, fill, dtype=tensor.dtype, device=tensor.device)
        tensor.data = one.expand(tensor.shape)
        tensor.grad = None
        StageTensor.watch(tensor, home)

    @staticmethod
    def resize(tensor: Tensor, shape: torch.Size) -> None:
        """Change the shape of ``tensor``, which was sent away."""
        with in_plain_sight():
            tensor.data = tensor.data[(slice(1),) * tensor.ndim].expand(shape)
        stride = torch.empty(shape, device="meta").stride()
        setattr(tensor, _HOME, replace(vars(tensor)[_HOME], stride=stride))

    @staticmethod
    def bring_back(tensor: Tensor, values: Tensor) -> None:
        """Make ``tensor`` an ordinary one again."""
        StageTensor.unwatch(tensor)
        tensor.data = values

    @staticmethod
    def watch(tensor: Tensor, home: HomeStages) -> None:
        """Guard ``tensor``: operations on it arrive in ``__torch_function__``."""
        setattr(tensor, _HOME, home)
        tensor.__class__ = StageParameter if isinstance(tensor, nn.Parameter) else StageTensor

    @staticmethod
    def unwatch(tensor: Tensor) -> None:
        """End the guard of ``tensor``."""
        tensor.__class__ = vars(tensor).pop(_HOME).kind


class StageParameter(StageTensor, nn.Parameter):
    """A guarded parameter; see [Note: guarded parameters]."""


def home_of(tensor: Any) -> HomeStages | None:
    """Placement of ``tensor``; ``None``: it is not guarded."""
    return _home(tensor) if isinstance(tensor, StageTensor) else None


def _first_home(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HomeStages:
    for leaf in args:
        if isinstance(leaf, StageTensor):
            return _home(leaf)
    return next(home for leaf in pytree.tree_leaves((args, kwargs)) if (home := home_of(leaf)))


def _home(tensor: StageTensor) -> HomeStages:
    home: HomeStages = vars(tensor)[_HOME]
    return home


def name_of(func: Any) -> str:
    """The user's name for an operation that arrives in ``__torch_function__``."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name
