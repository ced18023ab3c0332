"""Loss scaling under Lightning's precision plugins.

Lightning scales losses for ``16-mixed`` only, by a scaler of PyTorch's that looks at one rank's gradients. Here
whatever computes in float16 gets a scaler that all ranks agree on (:mod:`smp_strategy.precision.grad_scaler`), in
the same place of the plugin: it scales the loss before ``on_before_backward``, divides the gradients after backward and
before hooks and clipping look at them, and keeps its state in checkpoints where Lightning looks for it.

A step that is skipped is none: schedulers that count steps do not move. Lightning's ``global_step`` counts it, as ever,
since ``max_steps``, logging and checkpoints are about batches.

Gradients reach the parameters when Lightning says so, not when they are computed.

Lightning's order for one batch is ``training_step``, ``zero_grad``, ``loss.backward()``, hooks, clipping, optimizer
step. A pipeline has to run forward and backward of all microbatches together, so everything is done inside
``training_step``, before ``zero_grad`` wipes the gradients. So the engine keeps them aside, the returned loss hands
them over in its backward, and no hook is skipped: see [Note: commit] in :mod:`smp_strategy.engine.step_results`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.precision.grad_scaler import GradScaler, UnscaleResult
from smp_strategy.precision.loss_scale import ScalingRules

__all__ = [
    "for_all_ranks",
    "forget_gradients",
    "make_scaler",
    "methods_with",
    "passing_over_skipped",
    "problems_of_scaling",
]

# The name under which Lightning files the state of PyTorch's scaler.
_KEY: Final = "MixedPrecision"
_STOCK: Final = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)


def make_scaler(
    plugin: Any,
    config: SMPConfig,
    unscale: Callable[[Optimizer, float], UnscaleResult],
    optimizers: Callable[[], Iterable[Optimizer]],
) -> GradScaler | None:
    """The scaler for ``plugin``, if anything computes in float16; it goes on where an earlier one has stopped."""
    given = getattr(plugin, "scaler", None)
    rules = _rules(plugin, config, given)
    if rules is None:
        return None
    scaler = GradScaler(rules, unscale, optimizers)
    if isinstance(given, GradScaler):
        scaler.load_state_dict(given.state_dict())
    return scaler


def _rules(plugin: Any, config: SMPConfig, given: Any) -> ScalingRules | None:
    is_asked_for = config.loss_scale is not None or bool(config.rules_given)
    if getattr(plugin, "precision", None) == "16-mixed":
        if given is None or not given.is_enabled():
            return None
        if is_asked_for:
            return ScalingRules.of(config)
        return given.rules if isinstance(given, GradScaler) else ScalingRules.like(given)
    if config.fp16 or config.fp16_params:
        return ScalingRules.of(config)
    if getattr(plugin, "precision", None) == "16-true" and config.loss_scale is not None:
        return ScalingRules.of(config)
    return None


def problems_of_scaling(plugin: Any, config: SMPConfig) -> list[str]:
    """What is wrong with the options of loss scaling, given the Trainer's precision."""
    precision, given = getattr(plugin, "precision", None), getattr(plugin, "given_scaler", None)
    found = []
    asked = [] if config.loss_scale is None else [f"`loss_scale={config.loss_scale}`"]
    asked += config.rules_given
    if asked and getattr(plugin, "scaler", None) is None:
        why = f"`precision={precision!r}` of the Trainer"
        if precision == "16-true":
            why += " scales no losses. Set `loss_scale=dynamic` as well"
        else:
            why += " computes nothing in float16. Set it to '16-mixed'"
        found.append(f"{' and '.join(asked)} has no effect: {why}, or leave it out.")
    if given is not None and type(given) not in _STOCK:
        found.append(
            f"The precision plugin has a scaler of the class {type(given).__name__}, whose decisions cannot be agreed "
            "over ranks. Use `torch.amp.GradScaler`, or the options of strategy 'smp' (`loss_scale` ...)."
        )
    elif given is not None and asked and ScalingRules.like(given) != ScalingRules.like(torch.amp.GradScaler("cpu")):
        found.append(
            f"{' and '.join(asked)} contradict the scaler of the precision plugin, which has rules of its own. Leave "
            "one of them out."
        )
    return found


def methods_with(scaler: GradScaler, stock: Any, tree: Tree) -> dict[str, Any]:
    """What a precision plugin of class ``stock`` does otherwise because of ``scaler``."""
    base = tree.pytorch("plugins.precision.precision").Precision
    is_mixed = issubclass(stock, tree.pytorch("plugins.precision.amp").MixedPrecision)

    def optimizer_step(self: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Backward, then divide, then hooks and clipping, then the step, unless gradients have overflowed."""
        result = closure()
        if not scaler.has_unscaled(optimizer):  # by `clip_gradients`, under manual optimization
            scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        scaler.step(optimizer, closure=lambda: result, **kwargs)
        scaler.update()
        return result

    def pre_backward(self: Any, tensor: Any, module: Any) -> Any:
        """Scale the loss."""
        return stock.pre_backward(self, scaler.scale(tensor), module)

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        """Save the scale where Lightning looks for it."""
        stock.on_save_checkpoint(self, checkpoint)
        checkpoint[_KEY] = scaler.state_dict()

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        """Go on with the scale that a run with any precision has saved."""
        stock.on_load_checkpoint(self, checkpoint)
        scaler.load_state_dict(checkpoint.get(_KEY, {}))

    if is_mixed:
        # Lightning's own leads to the scaler. Optimizers that divide by themselves can be clipped here, too.
        is_own = "clip_gradients" in vars(tree.pytorch("plugins.precision.amp").MixedPrecision)
        return {"optimizer_step": optimizer_step, **({"clip_gradients": base.clip_gradients} if is_own else {})}
    return {
        "optimizer_step": optimizer_step,
        "pre_backward": pre_backward,
        "on_save_checkpoint": on_save_checkpoint,
        "on_load_checkpoint": on_load_checkpoint,
    }


@contextmanager
def passing_over_skipped(
    module: Any, scaler: GradScaler, optimizers: Sequence[Optimizer], configs: Sequence[Any]
) -> Iterator[None]:
    """Schedulers that go by steps pass over skipped ones while this is open, under automatic optimization.

    Args:
        module: the LightningModule, whose hook moves schedulers.
        scaler: knows what was skipped.
        optimizers: the fit's.
        configs: Lightning's, of the schedulers.
    """
    hook, before = module.lr_scheduler_step, vars(module).get("lr_scheduler_step")
    by_step = {id(config.scheduler) for config in configs if config.interval == "step"}

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        if id(scheduler) not in by_step or not any(map(scaler.has_skipped, optimizers)):
            hook(scheduler, metric)

    object.__setattr__(module, "lr_scheduler_step", lr_scheduler_step)
    try:
        yield
    finally:
        object.__delattr__(module, "lr_scheduler_step")
        if before is not None:
            object.__setattr__(module, "lr_scheduler_step", before)


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
    scaler_of: Callable[[Any], GradScaler | None],
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
    if not isinstance(given, GradScaler):
        plugin.given_scaler = given  # the user's, or one that Lightning has made
    plugin.scaler = scaler
    return plugin
