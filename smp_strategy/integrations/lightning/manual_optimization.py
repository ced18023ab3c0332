"""Manual optimization: backward, optimizer and scheduler calls of the user's step run once per batch.

The step runs once per microbatch, on every rank. During a fit, ``manual_backward``, the methods of optimizers and
schedulers, toggling and clipping are patched on the instances. In a step they wait for all microbatches and run once
(:mod:`smp_strategy.engine.manual_optimization`); anywhere else they behave as before. Lightning counts optimizer steps
inside the patched methods, so ``global_step`` counts batches.
"""

import functools
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.manual_optimization import ManualSteps
from smp_strategy.engine.step_results import loss_that_commits
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.optimizer_steps import updating
from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.lightning.steps import Context
from smp_strategy.model.patching import Patches

__all__ = ["ManualOptimization"]


class ManualOptimization:
    """Patches of a fit under manual optimization.

    ``context`` is entered around each merged call (the precision plugin's, as around the step).
    """

    def __init__(self, engine: Engine, module: Any, context: Context, scaler: GradScaler | None = None) -> None:
        self._engine = engine
        self._module = module
        self._context = context
        self._scaler = scaler
        self._patches = Patches()

    def install(self, optimizers: Sequence[Optimizer], wrapped: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Replace the methods of optimizers, of their LightningOptimizers (``wrapped``), and of their schedulers."""
        for index, pair in enumerate(zip(optimizers, wrapped, strict=True)):
            for optimizer, step in zip(pair, (self._step(pair[0]), pair[1].step), strict=True):
                self._patches.put(optimizer, "step", self._step_once(step, f"`step` of optimizer {index}"))
                self._patches.put(
                    optimizer, "zero_grad", self._once(optimizer.zero_grad, f"`zero_grad` of optimizer {index}")
                )
                for name in _other_steps(pair[0]):
                    self._patches.put(
                        optimizer, name, self._refused(getattr(pair[0], name), f"`{name}` of {type(pair[0]).__name__}")
                    )
        for index, scheduler in enumerate(schedulers):
            name = f"`step` of learning rate scheduler {index}"
            is_skipped = functools.partial(self._is_skipped, scheduler)
            self._patches.put(scheduler, "state_dict", _without_methods(scheduler.state_dict))
            step = self._once(scheduler.step, name, averaged=True, in_hooks=True, unless=is_skipped)
            self._patches.put(scheduler, "step", step)
        module = self._module
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            self._patches.put(module, name, self._once(getattr(module, name), f"`{name}`", also_dry=True))
        self._patches.put(module, "clip_gradients", self._once(self._clip(module.clip_gradients), "`clip_gradients`"))

    def remove(self) -> None:
        """Restore the methods."""
        self._patches.give_back()

    def backward(self, plain: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> None:
        """The strategy's ``backward`` in a step."""
        refused = [f"argument {number}" for number in range(1, len(args) + 1)] + sorted({*kwargs} - {"retain_graph"})
        if refused:
            raise UnsupportedError(
                f"`manual_backward` with {', '.join(refused)} is not supported by strategy 'smp'. Only `retain_graph` "
                "can be given. For gradients of gradients call `torch.autograd.grad(..., create_graph=True)` in the "
                "step, and add what is computed from them to the loss."
            )

        def act(losses: list[Any]) -> None:
            def commit(grad_output: Tensor) -> None:
                factor = grad_output.item()
                self._engine.manual.backward(losses, factor, retain_graph=bool(kwargs.get("retain_graph")))

            with self._context():
                plain(loss_that_commits(self._engine.manual.mean(losses), commit), None, **kwargs)

        self._engine.manual.once("`manual_backward`", act, loss)

    def reduce(self, optimizer: Any) -> None:
        """Reduce the gradients of ``optimizer`` over replicas and tied stages."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with self._engine.views.put_aside():
            self._engine.manual.reduce_gradients(parameters)

    def _once(
        self,
        method: Callable[..., Any],
        name: str,
        *,
        also_dry: bool = False,
        averaged: bool = False,
        in_hooks: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> Callable[..., Any]:
        manual = self._engine.manual

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not manual.is_in_step or (in_hooks and self._engine.views.is_open):
                return method(*args, **kwargs)

            def act(given: list[Any]) -> Any:
                args, kwargs = _agreed(name, given, manual if averaged else None)
                if unless():
                    return None
                with self._context():
                    return method(*args, **kwargs)

            return manual.once(name, act, (args, kwargs), also_dry=also_dry)

        return call

    def _step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Wrap ``step`` of the user's optimizer; its LightningOptimizer calls the wrapper, too."""
        method = optimizer.step

        @functools.wraps(method)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.reduce(optimizer)
            if args or kwargs.get("closure") is not None:
                # Lightning's hooks run in the closure; the strategy begins and ends the update around it.
                return method(*args, **kwargs)
            if self._scaler is not None:
                raise UnsupportedError(
                    "`step` of a bare optimizer (`use_pl_optimizer=False`) while losses are scaled for float16: its "
                    "gradients would be too large. Call `step` of what `self.optimizers()` returns."
                )
            with updating(self._engine, optimizer, in_sight=self._engine.mesh.pp == 1):
                return method(*args, **kwargs)

        return step

    def _step_once(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        once = self._once(method, name)

        @functools.wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if self._engine.manual.is_in_step and (args or kwargs.get("closure") is not None):
                raise UnsupportedError(
                    "`optimizer.step(closure)` under manual optimization is not built yet for strategy 'smp'. Call "
                    "`self.manual_backward(loss)` before it, and `optimizer.step()` without a closure."
                )
            return once(*args, **kwargs)

        return checked

    def _refused(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._engine.manual.is_in_step:
                raise UnsupportedError(
                    f"{name} in a step under manual optimization is not built yet for strategy 'smp': each microbatch "
                    "would call it, before the gradients of the batch are there. Use an optimizer with one `step`, or "
                    "train without this strategy."
                )
            return method(*args, **kwargs)

        return call

    def _clip(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def clip(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.reduce(optimizer)
            if self._scaler is not None:
                self._scaler.ensure_unscaled(getattr(optimizer, "_optimizer", optimizer))
            return method(optimizer, *args, **kwargs)

        return clip

    def _is_skipped(self, scheduler: Any) -> bool:
        """Whether the last step of a scheduler's optimizer was skipped because of overflow."""
        optimizer = getattr(scheduler, "optimizer", None)
        return self._scaler is not None and optimizer is not None and self._scaler.has_skipped(optimizer)


def _other_steps(optimizer: Optimizer) -> list[str]:
    """Names of further step methods, of optimizers with steps in several parts (SAM: `first_step`, `second_step`)."""
    names = (name for name in dir(type(optimizer)) if name.endswith("_step") and not name.startswith(("_", "get_")))
    return [name for name in names if not hasattr(Optimizer, name) and callable(getattr(optimizer, name))]


def _agreed(name: str, given: list[Any], averages: ManualSteps | None) -> Any:
    """Merge the arguments of all microbatches into those of the batch; ``averages``: takes means of numbers."""

    def agree(values: list[Any]) -> Any:
        if not any(isinstance(value, Tensor) for value in values) and all(value == values[0] for value in values):
            if averages is None or not isinstance(values[0], float):
                return values[0]
            # Equal in this replica, but replicas have samples of their own.
            return averages.over_replicas(torch.tensor(values[0], dtype=torch.float64)).item()
        if averages is None or not all(isinstance(value, (Tensor, Number)) for value in values):
            raise UnsupportedError(
                f"{name} is done once for the batch, but its microbatches give it different arguments: "
                f"{', '.join(map(repr, values))}. Compute them from something that is the same for all samples."
            )
        return averages.over_replicas(averages.mean(values))

    args = [agree(list(column)) for column in zip(*(args for args, _ in given), strict=True)]
    return args, {key: agree([kwargs[key] for _, kwargs in given]) for key in given[0][1]}


def _without_methods(state_dict: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Remove patched methods from a scheduler's state, which is all of its attributes."""
    return lambda: {name: value for name, value in state_dict().items() if name not in ("step", "state_dict")}
