"""Guard of a sharded parameter while its whole values are not there; see [Note: resting parameters]."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import SIZES, Guard

__all__ = ["RestingGuard"]

# [Note: resting parameters]
#
# A sharded parameter is one object for its whole life, because user code, optimizers and hooks hold it. Its memory and
# its class change:
#
#     state       class               memory                        from .. to
#     resting     GuardedParameter    a single NaN, expanded        otherwise
#     gathered    its own             view of the gathered buffer   wait .. free: forward and backward
#     piece       its own             this rank's elements, 1-D     show_pieces .. hide_pieces: optimizer
#     whole       its own             memory of its own             show_whole .. hide_whole: hooks of the user
#
# A resting parameter answers questions of metadata (`smp_strategy.model.guarded_tensors`). For all other operations
#   * while a hook of the user runs, the first use makes all parameters whole (collective: the hook runs on all ranks,
#     and the first use on one is the first on all);
#   * otherwise it raises.


@final
@dataclass
class RestingGuard(Guard):
    """Reaction to the use of resting parameters.

    Attributes:
        make_whole: Gives all parameters their values; ``None``: the use is refused.
        sizes: Whether asking for a size counts as a use: a whole parameter has another size.
    """

    make_whole: Callable[[], None] | None = None
    sizes: bool = False

    @property
    def can_lift(self) -> bool:
        """Whether a hook of the user runs."""
        return self.make_whole is not None

    def lift(self) -> None:
        """Make all parameters whole."""
        assert self.make_whole is not None
        self.make_whole()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation; see [Note: resting parameters]."""
        if self.sizes and self.can_lift and func in SIZES:
            # Before the metadata is read, since the class and the shape change with it.
            self.lift()
            return func(*args, **kwargs)
        return super().call(func, args, kwargs)

    def describe(self, tensor: Tensor) -> str:
        """Shape of ``tensor``, whose values are not needed."""
        return f"Parameter({list(tensor.shape)}, spread over ranks)"

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation outside of hooks."""
        words = door_words()
        return UnsupportedError(
            f"`{operation}` needs the values of a parameter that is spread over ranks (`sharded_data_parallel_degree`) "
            "and is not in use. Compute with it in the module that has it, or from the first step of its kind on, or "
            f"{words.in_hook}, where weights are whole; to save the model, call {words.save_model} on all ranks; to "
            'have the whole model after a run, set `restore_module="all"`.'
        )
