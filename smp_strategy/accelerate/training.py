"""The hooks of training: what is prepared, and what happens between forward and the optimizer's step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.accelerate.guesses import Guesses
from smp_strategy.accelerate.host import Host
from smp_strategy.accelerate.model import CallOptions, ModelCalls
from smp_strategy.accelerate.optimizer import SMPOptimizer, unwrapped
from smp_strategy.accelerate.scheduler import SMPScheduler
from smp_strategy.accelerate.session import Session
from smp_strategy.errors import UnsupportedError
from smp_strategy.precision.gradient_scaler import GradientScaler
from smp_strategy.precision.scaling import ScalingRules

__all__ = ["TrainingHooks"]


class TrainingHooks(Host):
    """See the module docstring."""

    def begin(self, session: Session, plugin: Any) -> None:
        """Nothing is prepared yet."""
        super().begin(session, plugin)
        self._smp_options = CallOptions(plugin.loss_in_model, plugin.loss_reduction, plugin.training_outputs)
        self._smp_calls: ModelCalls | None = None
        self._smp_syncs_blocked = 0
        config = session.config
        self._smp_scaler: GradientScaler | None = None
        if config.fp16 or config.fp16_params:
            self._smp_scaler = self._smp_make_scaler(ScalingRules.of(config))

    # Loss scaling

    @property
    def scaler(self) -> GradientScaler | None:
        """Scales losses, where anything computes in float16; all ranks agree on what has overflowed."""
        return self._smp_scaler

    @scaler.setter
    def scaler(self, given: Any) -> None:
        """Accelerate has made one, or none, after the precision that it was asked for."""
        if given is not None:
            config = self.smp.config
            asked = config.loss_scale is not None or config.rules_given
            self._smp_scaler = self._smp_make_scaler(ScalingRules.of(config) if asked else ScalingRules.like(given))

    def _smp_make_scaler(self, rules: ScalingRules) -> GradientScaler:
        return GradientScaler(
            rules, lambda *given: self.smp.engine.unscale(*given), lambda: unwrapped(self._optimizers)
        )

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare all of ``args``, in any order; the model is spread over the ranks when it is called first."""
        result = super().prepare(*args, device_placement=device_placement)
        self._smp_attach()
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Let the engine answer calls of ``model``. Collective."""
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if self._smp_calls is not None and self._smp_calls.model is not model:
            raise UnsupportedError(
                f"A {type(model).__name__} is prepared, but this Accelerator already serves a "
                f"{type(self._smp_calls.model).__name__}, and it serves one model. Put modules that are trained "
                "together into one `nn.Module`, or call `accelerator.free_memory()` when the first one is done with."
            )
        # Only placement and autocast: what Accelerate does for several processes is not for ours.
        model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        vars(model).pop("_original_forward", None)  # by which Accelerate would take our `forward` away as well
        engine = self.smp.make_engine()
        engine.attach(model)
        guesses = Guesses(
            scale=lambda: 1.0 if self._smp_scaler is None else self._smp_scaler.get_scale(),
            window=lambda: self.gradient_accumulation_steps,
            syncs=lambda: self.sync_gradients and not self._smp_syncs_blocked,
        )
        self._smp_calls = ModelCalls(model, engine, self._smp_options, guesses, self.check_even)
        self._smp_calls.install()
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap ``optimizer``."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        prepared = SMPOptimizer(
            optimizer,
            self.smp,
            device_placement=self.device_placement if device_placement is None else device_placement,
            scaler=self._smp_scaler,
        )
        self._optimizers.append(prepared)
        self._smp_attach()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap ``scheduler``."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        own = [each for each in self._optimizers if getattr(scheduler, "optimizer", None) is each.optimizer]
        prepared = SMPScheduler(
            scheduler,
            own or self._optimizers,
            self.smp,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        self._schedulers.append(prepared)
        return prepared

    def _smp_attach(self) -> None:
        """Tell the engine which optimizers there are."""
        if self._smp_calls is None or not self._optimizers:
            return
        self.smp.engine.attach(self._smp_calls.model, unwrapped(self._optimizers))

    # Between forward and the optimizer's step

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Calls in here do not end the accumulation window."""
        self._smp_syncs_blocked += 1
        try:
            yield
        finally:
            self._smp_syncs_blocked -= 1

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the scale of the loss, if it was scaled and they are not divided yet. Collective."""
        if self._smp_scaler is None or not self.smp.has_engine:
            return
        self.smp.engine.reduce_gradients()
        given = self._optimizers if optimizer is None else optimizer
        for each in unwrapped(given if isinstance(given, (tuple, list)) else [given]):
            if not self._smp_scaler.has_unscaled(each):
                self._smp_scaler.unscale_(each)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip by the norm over the gradients of all ranks; returns the norm before, everywhere. Collective."""
        if not self._smp_is_spread():
            norm: Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        self._smp_make_final()
        return self.smp.engine.clip_grad_norm_(_listed(parameters), max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each element of the gradients. Collective."""
        if not self._smp_is_spread():
            super().clip_grad_value_(parameters, clip_value)
            return
        self._smp_make_final()
        with self.smp.engine.views.put_aside():
            torch.nn.utils.clip_grad_value_(_listed(parameters), clip_value)

    def _smp_is_spread(self) -> bool:
        return self.smp.has_engine and self.smp.engine.partition is not None

    def _smp_make_final(self) -> None:
        """Add up what ranks have of gradients, and divide it by the scale of the loss."""
        self.smp.engine.reduce_gradients()
        self.unscale_gradients()

    # The end

    def free_memory(self, *objects: Any) -> Any:
        """Let go of everything that is prepared. The model is as this rank has it."""
        if self._smp_calls is not None:
            self._smp_calls.remove()
            self._smp_calls = None
        self.smp.close()
        return super().free_memory(*objects)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
