"""Gradients reach the parameters when Lightning says so, not when they are computed.

Lightning's order for one batch is ``training_step``, ``zero_grad``, ``loss.backward()``, hooks, clipping, optimizer
step. A pipeline has to run forward and backward of all microbatches together, so everything is done inside
``training_step``, before ``zero_grad`` wipes the gradients. So the engine keeps them aside, the returned loss hands
them over in its backward, and no hook is skipped: see [Note: commit] in :mod:`smp_strategy.engine.step_results`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.integrations.lightning.precision_plugin import methods_with
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.precision.grad_scaler import GradientScaler

__all__ = ["for_all_ranks", "forget_gradients"]


class ClipGradNorm(Protocol):
    """What the engine offers for clipping: the norm over all ranks' gradients, each counted once."""

    def __call__(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor: ...


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
