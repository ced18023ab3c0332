"""``no_sync``: gradients of several calls are added up before replicas average them.

Gradients are averaged when an optimizer steps, so there is nothing to hold back. But under PyTorch's DDP, where
averaging is a part of backward, an optimizer that steps in there applies those of its own replica: replicas go their
own ways until somebody averages weights (local SGD). That is not offered.
"""

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from smp_strategy.accelerate.session import Session
from smp_strategy.errors import UnsupportedError

__all__ = ["give_no_sync", "refuse_step_without_sync", "take_no_sync"]


def give_no_sync(model: nn.Module, session: Session, no_sync: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Let ``model`` have the method that DDP has.

    Args:
        model: prepared.
        session: of the Accelerator.
        no_sync: the Accelerator's.
    """

    def of_model(called: nn.Module) -> AbstractContextManager[None]:
        if called is not model:  # a copy
            return nullcontext()
        if (local_sgd := _local_sgd_above()) is not None:
            if session.num_data_ranks > 1:
                raise UnsupportedError(
                    f"LocalSGD lets {session.num_data_ranks} replicas step with their own gradients and averages their "
                    "weights now and then, but here gradients are averaged at each step. Leave it out, or give it "
                    "`enabled=False`; to average more seldom, set `gradient_accumulation_steps`."
                )
            local_sgd.enabled = False  # one replica is its own average
        return no_sync(called)

    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = types.MethodType(of_model, model)


def take_no_sync(model: nn.Module) -> None:
    """Undo that."""
    vars(model).pop("no_sync", None)


def refuse_step_without_sync(session: Session) -> None:
    """Raise if an optimizer steps inside of ``no_sync``, and replicas would have to do so each for itself."""
    if session.syncs_blocked and session.num_data_ranks > 1:
        raise UnsupportedError(
            f"The optimizer steps inside of `no_sync`, each of {session.num_data_ranks} replicas with its own "
            "gradients under DDP, but here gradients are averaged at each step. Step after `no_sync`, or do without."
        )


def _local_sgd_above() -> Any:
    """The LocalSGD of Accelerate that asks, if it is one that does."""
    module = sys.modules.get("accelerate.local_sgd")
    asking = sys._getframe(2).f_locals.get("self")
    return asking if module is not None and isinstance(asking, module.LocalSGD) else None
