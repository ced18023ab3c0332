"""Parameters and buffers that live on certain stages.

After the partition a rank has values for the units of its own stage only. The parameters of other stages keep their
identity (optimizers, schedulers and hooks refer to them), but whatever computes with one of them here, be it a hook
that clamps weights or ``torch.save(model.state_dict())``, must never get a plausible number.

So such a tensor changes its class, as PyTorch's own uninitialised parameters do: it is backed by a single element, and
every operation on it arrives in ``__torch_function__`` here. Questions of metadata are answered, everything else is
refused with the name, the stage and the remedy. When the values come back, the tensor gets its class back and is
an ordinary parameter again.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.placed import METADATA

__all__ = ["Home", "StageParameter", "StageTensor", "home_of", "in_plain_sight"]

# Where a tensor's home is noted on the tensor itself.
_HOME = "_smp_home"


def _accessors(*names: str) -> frozenset[Any]:
    """Methods of Tensor, and the getters and setters of its properties."""
    found = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    parts = [getattr(entry, part) for entry in found for part in ("__get__", "__set__") if hasattr(entry, part)]
    return frozenset([*found, *parts])


# What neither needs the values nor gives them away: the state of autograd and bookkeeping of optimizers.
_HARMLESS = METADATA | _accessors(
    *("grad", "requires_grad", "requires_grad_", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_version"),
    *("_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "is_shared"),
    *("register_post_accumulate_grad_hook", "untyped_storage", "__hash__", "__dir__", "grad_dtype"),
)


@final
@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a tensor lives, seen from a rank that does not have it."""

    name: str
    """Qualified name in the module."""
    holders: frozenset[int]
    """The stages that have its values."""
    stage: int
    """The stage of this rank."""
    kind: type[Tensor]
    """Its class while the values are here."""
    stride: tuple[int, ...]
    """Its memory layout while the values are here."""

    def refuse(self, operation: str) -> UnsupportedError:
        """The error for an operation that needs the values."""
        stages = " and ".join(str(stage) for stage in sorted(self.holders))
        return UnsupportedError(
            f"`{operation}` needs the values of `{self.name}`, which are on stage {stages} and not on stage "
            f"{self.stage}, that of this rank. To compute with it, do so inside a step; to save the model, call "
            "`trainer.save_checkpoint` on all ranks; to have the whole model after a run, leave `restore_module` at "
            '"all".'
        )


class StageTensor(Tensor):
    """A buffer whose values are elsewhere. See the module docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        home = next(home for leaf in pytree.tree_leaves((args, kwargs)) if (home := home_of(leaf)))
        raise home.refuse(_name(func))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        raise _home(self).refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _home(self).refuse("pickle")

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        home = _home(self)
        return f"{home.kind.__name__}({home.name}: {list(self.shape)} on stage {sorted(home.holders)})"

    @staticmethod
    def send_away(tensor: Tensor, name: str, holders: frozenset[int], stage: int) -> None:
        """Free the memory of ``tensor`` and let it stand for what ``holders`` have."""
        kind, stride = type(tensor), tuple(tensor.stride())
        fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        one = torch.full((1,) * tensor.ndim, fill, dtype=tensor.dtype, device=tensor.device)
        tensor.data = one.expand(tensor.shape)
        tensor.grad = None
        setattr(tensor, _HOME, Home(name=name, holders=holders, stage=stage, kind=kind, stride=stride))
        tensor.__class__ = StageParameter if isinstance(tensor, nn.Parameter) else StageTensor

    @staticmethod
    def bring_back(tensor: Tensor, values: Tensor) -> None:
        """Make ``tensor`` an ordinary one again."""
        tensor.__class__ = vars(tensor).pop(_HOME).kind
        tensor.data = values


class StageParameter(StageTensor, nn.Parameter):
    """A parameter whose values are elsewhere."""


def home_of(tensor: Any) -> Home | None:
    """Where ``tensor`` lives, if its values are not here."""
    return _home(tensor) if isinstance(tensor, StageTensor) else None


def in_plain_sight() -> Any:
    """A context in which the placeholders behind such tensors can be touched, for what sorts them out by itself."""
    return torch._C.DisableTorchFunctionSubclass()


def _home(tensor: StageTensor) -> Home:
    home: Home = vars(tensor)[_HOME]
    return home


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name
