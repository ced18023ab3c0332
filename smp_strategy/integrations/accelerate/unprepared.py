"""Optimizers that the script has not prepared step anyway, and need final gradients, too.

Accelerate does not notice them: under its own data parallelism gradients are final after backward. Here they become
final when they are needed, which the wrapper of a prepared optimizer knows. For the others PyTorch tells when any
optimizer of the process steps.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError

__all__ = ["Unprepared"]


@final
class Unprepared:
    """See the module docstring; watches until :meth:`end`.

    Args:
        model: what they train.
        engine: spreads it.
        prepared: the optimizers for which all is done elsewhere.
        is_scaled: whether gradients are multiplied, which only a prepared optimizer undoes.
        check: is told of any optimizer of the process that is about to step.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        prepared: Callable[[], Iterable[Optimizer]],
        is_scaled: Callable[[], bool],
        check: Callable[[Optimizer], None],
    ) -> None:
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._engine = engine
        self._prepared = prepared
        self._is_scaled = is_scaled
        self._check = check
        self._handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

    def end(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check(optimizer)
        if not self._concerns(optimizer):
            return
        name = type(optimizer).__name__
        if self._is_scaled():
            raise UnsupportedError(
                f"{name} steps without being prepared, but gradients are multiplied by the scale of the loss. Prepare "
                "it: `optimizer = accelerator.prepare(optimizer)`."
            )
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first argument is the optimizer itself
            raise UnsupportedError(
                f"{name} steps with a closure without being prepared, and gradients of a closure are not final. "
                "Prepare it: `optimizer = accelerator.prepare(optimizer)`."
            )
        if self._engine.config.shard_optimizer_state and callable(getattr(optimizer, "eval", None)):
            raise UnsupportedError(
                f"{name} changes weights in `eval()` and `train()` without being prepared, of which the ranks would "
                "not hear that do not keep its state (`shard_optimizer_state=True`). Prepare it: `optimizer = "
                "accelerator.prepare(optimizer)`."
            )
        self._engine.reduce_gradients()
        self._engine.begin_update(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._concerns(optimizer):
            self._engine.end_update(optimizer)

    def _concerns(self, optimizer: Optimizer) -> bool:
        if self._engine.partition is None or any(optimizer is each for each in self._prepared()):
            return False
        return any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"])
