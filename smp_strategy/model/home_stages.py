"""Home stages: which stages have the values of a tensor, and the guard of those that are elsewhere.

After the partition a rank has values for the units of its own stage only. Operations on parameters and buffers of other
stages are

* carried out where the values are, while a hook of the user runs: then tensors that *are* here are guarded, too, and
  their operations go to the view of that hook (:mod:`smp_strategy.engine.hooks.cross_stage`);
* refused with the name, the stage and the remedy at any other time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import (
    GRADIENT,
    HARMLESS,
    SIZES,
    Guard,
    guard_of,
    in_plain_sight,
    name_of,
    placeholder,
    unwatch,
    watch,
)

__all__ = ["HomeStages", "HookAccess", "bring_back", "home_of", "resize", "send_away"]


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
    copy: Callable[[Tensor], Tensor] | None = None
    make_whole: Callable[[], None] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class HomeStages(Guard):
    """Placement of a tensor, seen from one rank, and its guard where the values are not."""

    name: str
    """Qualified name in the module."""
    holders: frozenset[int]
    """Stages that have its values."""
    stage: int
    """Stage of this rank."""
    stride: tuple[int, ...]
    """Memory layout where the values are."""
    sight: HookAccess
    """Shared by all tensors of a module."""

    @property
    def is_here(self) -> bool:
        """Whether this rank has the values."""
        return self.stage in self.holders

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation that needs the values."""
        words = door_words()
        stages = " and ".join(str(stage) for stage in sorted(self.holders))
        return UnsupportedError(
            f"`{operation}` needs the values of `{self.name}`, which are on stage {stages} and not on stage "
            f"{self.stage}, that of this rank. Compute with it in a step (without `skip_tracing`) from the first of "
            f"its kind on, or {words.in_hook}; to save the model, call {words.save_model} on all ranks; to have the "
            'whole model after a run, set `restore_module="all"`.'
        )

    @property
    def can_lift(self) -> bool:
        """Whether a hook runs, whose view carries operations out."""
        return self.sight.call is not None

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation, from the view of the hook that runs."""
        if func not in HARMLESS:
            if self.sight.call is not None:
                return self.sight.call(func, args, kwargs)
            if func not in GRADIENT:
                raise self.refusal(name_of(func))
        elif func in SIZES and self.sight.make_whole is not None:
            self.sight.make_whole()
        with in_plain_sight():
            return func(*args, **kwargs)

    def copy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """Independent tensor with the same home."""
        if self.sight.copy is None:
            raise self.refusal("copy.deepcopy")
        if id(tensor) not in memo:
            memo[id(tensor)] = self.sight.copy(tensor)
        copied: Tensor = memo[id(tensor)]
        return copied

    def pickle(self, tensor: Tensor, protocol: Any) -> Any:
        """Refuse: a file of one rank would hold no values.

        Raises:
            UnsupportedError: always.
        """
        raise self.refusal("pickle")

    def describe(self, tensor: Tensor) -> str:
        """Name, shape and stages."""
        kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
        return f"{kind}({self.name}: {list(tensor.shape)} on stage {sorted(self.holders)})"


def home_of(tensor: Any) -> HomeStages | None:
    """Placement of ``tensor``; ``None``: it is not guarded as a tensor of stages."""
    guard = guard_of(tensor)
    return guard if isinstance(guard, HomeStages) else None


def send_away(tensor: Tensor, home: HomeStages) -> None:
    """Free the memory of ``tensor`` and guard it."""
    tensor.data = placeholder(tensor.shape, tensor.dtype, tensor.device)
    tensor.grad = None
    watch(tensor, home)


def resize(tensor: Tensor, shape: torch.Size) -> None:
    """Change the shape of ``tensor``, which was sent away."""
    home = home_of(tensor)
    assert home is not None
    with in_plain_sight():
        tensor.data = tensor.data[(slice(1),) * tensor.ndim].expand(shape)
    stride = torch.empty(shape, device="meta").stride()
    unwatch(tensor)
    watch(tensor, replace(home, stride=stride))


def bring_back(tensor: Tensor, values: Tensor) -> None:
    """Make ``tensor`` an ordinary one again."""
    unwatch(tensor)
    tensor.data = values
