"""An optimizer's own ``state_dict()`` has what this rank updates: a part, which must not pass for the whole in a file.

Code may read it, copy it and load it again (to undo an update, say). Pickling is refused, and with it ``torch.save``.
"""

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NoReturn

from torch.optim import Optimizer

from smp_strategy.errors import UnsupportedError

__all__ = ["mark_own_states"]


class _OwnState(dict[Any, Any]):
    """The state of the parameters that this rank updates, by their numbers."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"`optimizer.state_dict()` has the state of {len(self)} parameters here: what this rank updates, not the "
            "whole. To save it, call `trainer.save_checkpoint` or `accelerator.save_state` on all ranks, or "
            "`state_dict()` of the optimizer that `accelerator.prepare` has returned."
        )

    def copy(self) -> "_OwnState":
        return _OwnState(self)

    def __copy__(self) -> "_OwnState":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OwnState":
        return _OwnState((key, deepcopy(value, memo)) for key, value in self.items())


def mark_own_states(optimizer: Optimizer) -> None:
    """From now on ``optimizer`` has the state of a part of its parameters, or of parts of them."""
    # Wrappers around another optimizer may have left `Optimizer.__init__` out.
    hooks = vars(optimizer).setdefault("_optimizer_state_dict_post_hooks", OrderedDict())
    if _mark not in hooks.values():
        optimizer.register_state_dict_post_hook(_mark)


def _mark(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "state": _OwnState(state["state"])}
