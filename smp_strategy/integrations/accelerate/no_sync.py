"""``no_sync``: accumulate gradients of several calls before replicas average them.

Gradients are averaged when an optimizer steps, so there is no communication to hold back. But under PyTorch's DDP,
where averaging is a part of backward, an optimizer step inside ``no_sync`` applies the gradients of its own replica
only: replicas diverge until their weights are averaged (local SGD). That is not supported.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

from torch import nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.accelerate.session import Session

__all__ = ["give_no_sync", "refuse_step_without_sync", "take_no_sync"]


def give_no_sync(model: nn.Module, session: Session, no_sync: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Give a prepared ``model`` the method ``no_sync`` of DDP, which is that of the Accelerator."""

    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = _NoSync(session, partial(no_sync, model))


@final
class _NoSync:
    """The method ``no_sync`` of a prepared model; a copy of the model gets one without effect."""

    def __init__(self, session: Session, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._session = session
        self._no_sync = no_sync

    def __call__(self) -> AbstractContextManager[None]:
        if (local_sgd := _local_sgd_above()) is not None:
            if self._session.num_data_ranks > 1:
                raise UnsupportedError(
                    f"LocalSGD lets {self._session.num_data_ranks} replicas step with their own gradients and averages "
                    "their weights now and then, but here gradients are averaged at each step. Leave it out, or give "
                    "it `enabled=False`; to average more seldom, set `gradient_accumulation_steps`."
                )
            local_sgd.enabled = False  # one replica is its own average
        return self._no_sync()

    def __reduce__(self) -> Any:
        return _of_copy, ()


def _of_copy() -> type[nullcontext[None]]:
    return nullcontext


def take_no_sync(model: nn.Module) -> None:
    """Undo :func:`give_no_sync`."""
    vars(model).pop("no_sync", None)


def refuse_step_without_sync(session: Session) -> None:
    """Raise if an optimizer steps inside ``no_sync`` while there are several replicas."""
    if session.syncs_blocked and session.num_data_ranks > 1:
        raise UnsupportedError(
            f"The optimizer steps inside of `no_sync`, each of {session.num_data_ranks} replicas with its own "
            "gradients under DDP, but here gradients are averaged at each step. Step after `no_sync`, or do without."
        )


def _local_sgd_above() -> Any:
    """Return the calling ``LocalSGD`` of Accelerate, if it is one."""
    module = sys.modules.get("accelerate.local_sgd")
    asking = sys._getframe(2).f_locals.get("self")
    return asking if module is not None and isinstance(asking, module.LocalSGD) else None
