"""Validation: one error before training for all Lightning features that this strategy does not support.

Without it, a run would continue with wrong numbers.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from smp_strategy.errors import ConfigError
from smp_strategy.integrations.lightning.precision_plugin import problems_of_scaling
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["grows_later", "refuse_unsupported"]

PRECISIONS: Final = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")


def refuse_unsupported(trainer: Any, module: Any, optimizers: Sequence[Optimizer], *, spreads: bool) -> None:
    """Raise one error for all unsupported features of this run.

    ``spreads``: a rank holds only some of the weights, or parts of them. Outside of ``fit`` there are no optimizers.
    """
    problems = [*_of_trainer(trainer), *_of_module(module), *_of_optimizers(optimizers)]
    problems += _of_spread_weights(trainer) if spreads else []
    if problems:
        raise ConfigError(problems)


def grows_later(trainer: Any, module: Any, tree: Tree) -> bool:
    """Whether user code may add submodules after ``fit`` is called, in ``configure_model`` or ``setup``."""
    hooks = [getattr(type(module), "configure_model", None)]
    hooks += [getattr(type(each), "setup", None) for each in (module, *trainer.callbacks)]
    ours = ("smp_strategy", tree.root.split(".")[0])
    return any(str(getattr(hook, "__module__", ours[0])).split(".")[0] not in ours for hook in hooks)


def _of_trainer(trainer: Any) -> list[str]:
    found = []
    precision = getattr(trainer.precision_plugin, "precision", None)
    if precision not in PRECISIONS:
        shown = precision or type(trainer.precision_plugin).__name__
        found.append(
            f"`precision={shown!r}` is not built yet for strategy 'smp'. Choose one of {', '.join(PRECISIONS)}."
        )
    config = trainer.strategy.config
    found += [
        f"`{name}=True` contradicts `precision={precision!r}` of the Trainer: both say in what units compute. Leave "
        "one of them out."
        for name in ("fp16", "bf16", "fp16_params")
        if getattr(config, name) and precision != "32-true"
    ]
    found += problems_of_scaling(trainer.precision_plugin, config)
    if trainer.strategy._layer_sync is not None:
        found.append("`sync_batchnorm=True` is not built yet for strategy 'smp'. Leave it out or use another norm.")
    norm, given = config.sdp_gradient_clipping, trainer.gradient_clip_val
    if norm is not None and given:
        found.append(
            f"`sdp_gradient_clipping` ({norm}) contradicts `gradient_clip_val` ({given}) of the Trainer: both clip the "
            "gradients of the same step. Leave one of them out."
        )
    return found


def _of_spread_weights(trainer: Any) -> list[str]:
    names = {each.__name__ for callback in trainer.callbacks for each in type(callback).__mro__}
    if "ModelPruning" not in names:
        return []
    return [
        "The callback ModelPruning puts other parameters into layers during training, which ranks share by then. Prune "
        "before it (`torch.nn.utils.prune` in `__init__` or `configure_model`), or let every rank have all weights "
        "(no stages, shards or split layers)."
    ]


def _of_module(module: Any) -> list[str]:
    found = []
    name = type(module).__name__
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, step, None)
        if method is not None and "dataloader_iter" in inspect.signature(method).parameters:
            found.append(f"{name}.{step} takes a `dataloader_iter`, which hides the batch. Take a `batch` instead.")
    return found


def _of_optimizers(optimizers: Sequence[Optimizer]) -> list[str]:
    return [
        "The optimizer LBFGS evaluates the loss several times per step, which is not built yet for strategy 'smp'. "
        "Use a first-order optimizer."
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.LBFGS)
    ]
