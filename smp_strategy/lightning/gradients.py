"""Gradients reach the parameters when Lightning says so, not when they are computed.

Lightning's order for one batch is ``training_step``, ``zero_grad``, ``loss.backward()``, hooks, clipping, optimizer
step. A pipeline has to run forward and backward of all microbatches together, so everything is done inside
``training_step``, before ``zero_grad`` wipes the gradients. Hence:

[Note: commit] The engine keeps the step's gradients aside. The returned loss has one node in its graph, and the
backward of that node adds ``incoming gradient * gradient of the mean loss`` to ``.grad``. So whatever is done to the
loss before ``backward()`` (division by the accumulated batches, a user's ``LightningModule.backward``) acts on the
gradients as in a single process, and no hook is skipped.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.optim import Optimizer

from smp_strategy.errors import UnsupportedError
from smp_strategy.lightning.factory import Tree
from smp_strategy.lightning.scaling import methods_with
from smp_strategy.precision.gradient_scaler import GradientScaler

__all__ = ["evaluated_once", "for_all_ranks", "forget_gradients", "loss_that_commits"]


class ClipGradNorm(Protocol):
    """What the engine offers for clipping: the norm over all ranks' gradients, each counted once."""

    def __call__(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor: ...


def loss_that_commits(loss: Tensor, commit: Callable[[Tensor], None]) -> Tensor:
    """``loss``, whose ``backward()`` calls ``commit`` with the incoming gradient. See [Note: commit]."""
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    committed: Tensor = _Commit.apply(anchor, loss, commit)  # type: ignore[no-untyped-call]
    return committed


class _Commit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, loss: Tensor, commit: Callable[[Tensor], None]) -> Tensor:
        ctx.commit = commit  # type: ignore[attr-defined]
        return loss.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[None, None, None]:
        ctx.commit(grad_output)  # type: ignore[attr-defined]
        return None, None, None


def evaluated_once(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
    """``closure``, which refuses to be called again.

    An optimizer that evaluates the loss again does so at weights that it has changed by what it knows of all
    gradients (a line search, a perturbation of a given norm); on a rank it knows those of one stage.
    """
    calls = 0

    def once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise UnsupportedError(
                f"The optimizer {type(optimizer).__name__} evaluates the loss several times per step, which is not "
                "built yet for strategy 'smp': it would decide by the gradients of one stage. Use an optimizer that "
                "calls its closure once."
            )
        return closure()

    return once


def forget_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Do before a step what Lightning does after it: a step runs backward, too, and would have both in memory."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            optimizer.zero_grad()


def for_all_ranks(
    plugin: Any,
    tree: Tree,
    clip_grad_norm: ClipGradNorm,
    begin_update: Callable[[Any], None],
    scaler_of: Callable[[Any], GradientScaler | None],
) -> Any:
    """Let Lightning's precision plugin know that there are other ranks with gradients.

    The plugin is the user's object and others may hold it, so its class is replaced rather than the object. The new
    class keeps its name: Lightning files the plugin's state in checkpoints under it.

    Args:
        plugin: the plugin.
        tree: the Lightning tree in use.
        clip_grad_norm: clips by the norm over all ranks instead of this rank's share.
        begin_update: called with each optimizer when nothing will look at gradients any more but its step.
        scaler_of: makes the scaler of losses for the plugin, if it needs one.
    """
    stock = getattr(type(plugin), "stock_plugin", type(plugin))

    def clip_grad_by_norm(self: Any, optimizer: Any, clip_val: float) -> None:
        """Clip gradients by their norm over all ranks."""
        clip_grad_norm(list(self.main_params(optimizer)), clip_val)

    def after_closure(self: Any, model: Any, optimizer: Any) -> None:
        """Run hooks and clip, as ever; what comes next is the optimizer."""
        stock._after_closure(self, model, optimizer)
        begin_update(optimizer)

    scaler = scaler_of(plugin)
    names = {
        "clip_grad_by_norm": clip_grad_by_norm,
        "_after_closure": after_closure,
        **({} if scaler is None else methods_with(scaler, stock, tree)),
        "stock_plugin": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    plugin.__class__ = type(stock.__name__, (stock,), names)
    given = getattr(plugin, "scaler", None)
    if not isinstance(given, GradientScaler):
        plugin.given_scaler = given  # the user's, or one that Lightning has made
    plugin.scaler = scaler
    return plugin
