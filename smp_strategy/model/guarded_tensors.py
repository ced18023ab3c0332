"""Parameters and buffers that live on certain stages.

After the partition a rank has values for the units of its own stage only. The parameters of other stages keep their
identity (optimizers, schedulers and hooks refer to them), but whatever computes with one of them here, be it a hook
that clamps weights or ``torch.save(model.state_dict())``, must never get a plausible number.

So such a tensor changes its class, as PyTorch's own uninitialised parameters do: it is backed by a single element, and
every operation on it arrives in ``__torch_function__`` here. Questions of metadata are answered. For the rest there
are two cases:

* while a hook of the user runs, tensors that *are* here change their class, too, and operations go to the view of
  that hook (:mod:`smp_strategy.engine.hooks.cross_stage`), which carries them out where the values are;
* otherwise they are refused with the name, the stage and the remedy.

When the values come back, the tensor gets its class back and is an ordinary one again.
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

# A context in which the memory behind such tensors can be touched, for what sorts them out by itself.
in_plain_sight: Any = torch._C.DisableTorchFunctionSubclass

# Where a tensor's home is noted on the tensor itself.
_HOME = "_smp_home"


def _accessors(*names: str) -> frozenset[Any]:
    """Methods of Tensor, and the getters and setters of its properties."""
    found = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    parts = [
        getattr(entry, part) for entry in found for part in ("__get__", "__set__", "__delete__") if hasattr(entry, part)
    ]
    return frozenset([*found, *parts])


GRADIENT = _accessors("grad")
_GRAD: Any = Tensor.grad  # which is a descriptor
_get_grad = _GRAD.__get__
# Which parameters are meant is all that they want to know.
BY_IDENTITY: frozenset[Any] = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
# What neither needs the values nor gives them away: the state of autograd and bookkeeping of optimizers.
HARMLESS = METADATA | _accessors(
    *("requires_grad", "requires_grad_", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_version"),
    *("_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "is_shared"),
    *("register_post_accumulate_grad_hook", "untyped_storage", "__hash__", "__dir__", "grad_dtype"),
)
# Questions about how much there is.
SIZES = frozenset({torch.numel}) | _accessors(
    *("shape", "nbytes", "size", "stride", "numel", "nelement", "is_contiguous", "is_same_size", "__len__"),
    *("untyped_storage", "storage_offset"),
)


@final
@dataclass
class HookAccess:
    """Who answers for the values of all stages just now.

    Attributes:
        call: carries out an operation on such tensors where their values are; ``None`` where nobody can.
        copy: makes an independent tensor with the same home; goes with ``call``.
        make_whole: called before questions about sizes are answered, where sizes are those of parts.
    """

    call: Callable[[Any, Any, Any], Any] | None = None
    copy: Callable[["StageTensor"], Tensor] | None = None
    make_whole: Callable[[], None] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class HomeStages:
    """Where a tensor lives, seen from one rank."""

    name: str
    """Qualified name in the module."""
    holders: frozenset[int]
    """The stages that have its values."""
    stage: int
    """The stage of this rank."""
    kind: type[Tensor]
    """Its class when it is an ordinary tensor."""
    stride: tuple[int, ...]
    """Its memory layout where the values are."""
    sight: HookAccess
    """Shared by all tensors of a module."""

    @property
    def is_here(self) -> bool:
        """Whether this rank has the values."""
        return self.stage in self.holders

    def refuse(self, operation: str) -> UnsupportedError:
        """The error for an operation that needs the values."""
        stages = " and ".join(str(stage) for stage in sorted(self.holders))
        return UnsupportedError(
            f"`{operation}` needs the values of `{self.name}`, which are on stage {stages} and not on stage "
            f"{self.stage}, that of this rank. Compute with it in a step, in a hook of Lightning, or in "
            "`accelerator.smp.with_weights(lambda: ...)` on all ranks; to save the model, "
            "call `trainer.save_checkpoint` or `accelerator.get_state_dict(model)` on all ranks; to have the whole "
            'model after a run, leave `restore_module` at "all".'
        )


class StageTensor(Tensor):
    """A buffer, or any other tensor, that lives on certain stages. See the module docstring."""

    # Placed tensors leave operations that involve such a tensor to this class.
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
        """Optimizers ask for it twice per step, of all parameters: where nobody else answers, this is short."""
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
        """Free the memory of ``tensor`` and let it stand for what others have."""
        fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        one = torch.full((1,) * tensor.ndim, fill, dtype=tensor.dtype, device=tensor.device)
        tensor.data = one.expand(tensor.shape)
        tensor.grad = None
        StageTensor.watch(tensor, home)

    @staticmethod
    def resize(tensor: Tensor, shape: torch.Size) -> None:
        """Let ``tensor``, which was sent away, stand for something of another ``shape``."""
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
        """Let operations on ``tensor`` arrive here."""
        setattr(tensor, _HOME, home)
        tensor.__class__ = StageParameter if isinstance(tensor, nn.Parameter) else StageTensor

    @staticmethod
    def unwatch(tensor: Tensor) -> None:
        """Let operations on ``tensor`` go their usual way."""
        tensor.__class__ = vars(tensor).pop(_HOME).kind


class StageParameter(StageTensor, nn.Parameter):
    """A parameter that lives on certain stages."""


def home_of(tensor: Any) -> HomeStages | None:
    """Where ``tensor`` lives, if operations on it arrive here."""
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
    """What the user calls the operation that arrives in ``__torch_function__``."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name
