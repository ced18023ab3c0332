"""Precision plugins: loss scaling, gradient clipping and the order of an update, agreed over all ranks.

*Loss scaling.* Lightning scales losses for ``16-mixed`` only, with PyTorch's scaler, which checks the gradients of a
single rank. Here every float16 computation gets a scaler that all ranks agree on
(:mod:`smp_strategy.engine.updates.grad_scaler`), at the same point of the plugin: it scales the loss before
``on_before_backward``, unscales the gradients after backward and before hooks and clipping, and keeps its state under
Lightning's key in checkpoints. Schedulers that count steps do not move for a skipped step. Lightning's ``global_step``
still counts it, since ``max_steps``, logging and checkpoints are about batches.

*Order.* Lightning's order for a batch is ``training_step``, ``zero_grad``, ``loss.backward()``, hooks, clipping,
optimizer step. A pipeline runs forward and backward of all microbatches together inside ``training_step``, before
``zero_grad`` wipes the gradients. So the engine sets them aside, the returned loss hands them over in its backward, and
no hook is skipped: see [Note: commit] in :mod:`smp_strategy.engine.step_results`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.updates.grad_scaler import GradScaler, Unscale
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.model.patching import Patches, subclass_of

__all__ = [
    "for_all_ranks",
    "forget_gradients",
    "make_scaler",
    "methods_with",
    "passing_over_skipped",
    "problems_of_scaling",
]

# Lightning's checkpoint key for the state of PyTorch's scaler.
_KEY: Final = "MixedPrecision"
_STOCK: Final = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)


def make_scaler(
    plugin: Any,
    config: SMPConfig,
    unscale: Unscale,
    optimizers: Callable[[], Iterable[Optimizer]],
) -> GradScaler | None:
    """The scaler for ``plugin``, if anything computes in float16; it takes over the state of an earlier one."""
    given = getattr(plugin, "scaler", None)
    rules = _rules(plugin, config, given)
    if rules is None:
        return None
    scaler = GradScaler(rules, unscale, optimizers)
    if isinstance(given, GradScaler):
        scaler.load_state_dict(given.state_dict())
    return scaler


def _rules(plugin: Any, config: SMPConfig, given: Any) -> ScalingRules | None:
    if getattr(plugin, "precision", None) == "16-mixed":
        if given is None or not given.is_enabled():
            return None
        if config.scaling_asked:
            return ScalingRules.of(config)
        return given.rules if isinstance(given, GradScaler) else ScalingRules.like(given)
    if config.fp16 or config.fp16_params:
        return ScalingRules.of(config)
    if getattr(plugin, "precision", None) == "16-true" and config.loss_scale is not None:
        return ScalingRules.of(config)
    return None


def problems_of_scaling(plugin: Any, config: SMPConfig) -> list[str]:
    """Errors in the options of loss scaling, given the Trainer's precision."""
    precision, given = getattr(plugin, "precision", None), getattr(plugin, "given_scaler", None)
    found = []
    asked = config.scaling_asked
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
    """Methods that override those of the precision plugin class ``stock`` to use ``scaler``."""
    base = tree.pytorch("plugins.precision.precision").Precision
    is_mixed = issubclass(stock, tree.pytorch("plugins.precision.amp").MixedPrecision)

    def optimizer_step(self: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Backward, unscale, hooks and clipping, then the step unless gradients have overflowed."""
        result = closure()
        scaler.ensure_unscaled(optimizer)  # under manual optimization `clip_gradients` may have done so
        self._after_closure(model, optimizer)
        scaler.step(optimizer, closure=lambda: result, **kwargs)
        scaler.update()
        return result

    def pre_backward(self: Any, tensor: Any, module: Any) -> Any:
        """Scale the loss."""
        return stock.pre_backward(self, scaler.scale(tensor), module)

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        """Save the scaler's state under Lightning's key."""
        stock.on_save_checkpoint(self, checkpoint)
        checkpoint[_KEY] = scaler.state_dict()

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        """Load the scaler's state, saved by a run of any precision."""
        stock.on_load_checkpoint(self, checkpoint)
        scaler.load_state_dict(checkpoint.get(_KEY, {}))

    if is_mixed:
        # The other methods of MixedPrecision use `self.scaler` already. Its clipping refuses optimizers that unscale by
        # themselves, which is no problem here.
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
    """Keep step-wise schedulers from moving in skipped steps while this is open, under automatic optimization."""
    hook = module.lr_scheduler_step
    by_step = {id(config.scheduler) for config in configs if config.interval == "step"}

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        if id(scheduler) not in by_step or not any(map(scaler.has_skipped, optimizers)):
            hook(scheduler, metric)

    with Patches() as patches:
        patches.put(module, "lr_scheduler_step", lr_scheduler_step)
        yield


def forget_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Zero the gradients before a step instead of after it: the step runs backward, and would hold both in memory."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            optimizer.zero_grad()


def for_all_ranks(
    plugin: Any,
    tree: Tree,
    clip_grad_norm: Callable[[list[nn.Parameter], float], Tensor],
    begin_update: Callable[[Any], object],
    scaler_of: Callable[[Any], GradScaler | None],
) -> Any:
    """Make Lightning's precision plugin clip and scale by the gradients of all ranks.

    The plugin is the user's object and may be referenced elsewhere, so its class is replaced instead of the object. The
    new class keeps its name, which Lightning uses as a key in checkpoints. ``begin_update`` is called with each
    optimizer after the last hook that reads gradients, before its step.
    """
    stock = getattr(type(plugin), "stock_plugin", type(plugin))

    def clip_grad_by_norm(self: Any, optimizer: Any, clip_val: float) -> None:
        """Clip gradients by their norm over all ranks."""
        clip_grad_norm(list(self.main_params(optimizer)), clip_val)

    def after_closure(self: Any, model: Any, optimizer: Any) -> None:
        """Run hooks and clip, then begin the update."""
        stock._after_closure(self, model, optimizer)
        begin_update(optimizer)

    scaler = scaler_of(plugin)
    methods = {} if scaler is None else methods_with(scaler, stock, tree)
    methods |= {"clip_grad_by_norm": clip_grad_by_norm, "_after_closure": after_closure}
    plugin.__class__ = subclass_of(stock, stock_plugin=stock, **methods)
    given = getattr(plugin, "scaler", None)
    if not isinstance(given, GradScaler):
        plugin.given_scaler = given  # the user's or Lightning's
    plugin.scaler = scaler
    return plugin
