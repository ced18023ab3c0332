"""Training hooks of the Accelerator: ``prepare``, gradient clipping and unscaling, ``free_memory``, ``end_training``.

Of all models that a script prepares, the one that is trained is partitioned over the ranks. Others are kept whole on
every rank: criteria without parameters, and models that are only evaluated, such as a teacher. The purpose of a model
is not certain when it is prepared; a frozen one, or one in evaluation mode that no known optimizer trains, is
partitioned until a trained one comes.
"""

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.left_sharded import engine_left, leave_spread, restore_left
from smp_strategy.engine.lifecycle.crash_report import has_crashed
from smp_strategy.engine.lifecycle.run_lifecycle import leave_at_exit, note_settings
from smp_strategy.engine.model_calls.lent_weights import LentWeights
from smp_strategy.engine.model_calls.model_calls import BackwardPrediction, CallOptions, ModelCalls
from smp_strategy.engine.pretrained import has_values, read_now
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.engine.updates.optimizer_steps import trains
from smp_strategy.integrations.accelerate.data import ActiveLoader
from smp_strategy.integrations.accelerate.no_sync import give_no_sync, take_no_sync
from smp_strategy.integrations.accelerate.optimizer import SMPOptimizer, SMPScheduler, UnpreparedOptimizers, unwrapped
from smp_strategy.integrations.accelerate.session import HookBase, Session, settings_of_accelerator
from smp_strategy.integrations.accelerate.validation import (
    prepared_elsewhere,
    refuse_compiled,
    refuse_foreign,
    second_model,
)

__all__ = ["PreparedModel", "TrainingHooks"]


@final
class PreparedModel:
    """Choice of the model to partition, out of those that are prepared together; others are whole on every rank."""

    def __init__(self) -> None:
        self.chosen: nn.Module | None = None
        self.others: list[nn.Module] = []
        self._evaluated: list[nn.Module] = []
        self._coming: list[Optimizer] = []

    def clear(self) -> None:
        """Forget all prepared models."""
        self.chosen = None
        for each in (self.others, self._evaluated, self._coming):
            each.clear()

    def begin(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], prepared: Iterable[Optimizer]
    ) -> None:
        """Choose among ``models``, about to be prepared with ``optimizers``; ``prepared`` optimizers exist already."""
        self._coming = list(optimizers)
        known = [*prepared, *optimizers]
        wanting = [model for model in models if not self.may_stay_whole(model, prepared)]
        trained = [model for model in wanting if any(trains(each, model) for each in known)]
        for candidates in (trained, wanting):
            if len(candidates) == 1:
                self.chosen = candidates[0]
                return

    def evaluates(self, model: nn.Module) -> None:
        """Note that the script declares ``model`` as not trained."""
        self._evaluated.append(model)

    def may_stay_whole(self, model: nn.Module, prepared: Iterable[Optimizer]) -> bool:
        """Whether ``model`` need not be partitioned, given the ``prepared`` optimizers."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return True
        known = [*prepared, *self._coming]
        is_evaluated = any(model is each for each in self._evaluated)
        return is_evaluated or (not model.training and not any(trains(each, model) for each in known))

    def other_of(self, optimizer: Optimizer) -> nn.Module | None:
        """Return one of :attr:`others` that ``optimizer`` trains, if any."""
        return next((model for model in self.others if trains(optimizer, model)), None)


class TrainingHooks(HookBase):
    """Methods of the Accelerator for preparation, gradients and the end of training."""

    def begin(self, session: Session, plugin: Any) -> None:
        """Create the state of these hooks; nothing is prepared yet."""
        super().begin(session, plugin)
        leave_at_exit(self._smp_leave)
        self._smp_options = CallOptions(plugin.loss_in_model, plugin.loss_reduction, plugin.training_outputs)
        self._smp_unprepared: UnpreparedOptimizers | None = None
        self._smp_models = PreparedModel()
        config = session.config
        if config.fp16 or config.fp16_params:
            self.smp.scaler = self._smp_make_scaler(ScalingRules.of(config))

    # Loss scaling

    @property
    def scaler(self) -> GradScaler | None:
        """Loss scaler, if anything computes in float16; all ranks agree on overflows."""
        return self.smp.scaler

    @scaler.setter
    def scaler(self, given: Any) -> None:
        """Replace the scaler that Accelerate made for its own ``mixed_precision``, if any."""
        if given is not None:
            config = self.smp.config
            rules = ScalingRules.of(config) if config.scaling_asked else ScalingRules.like(given)
            self.smp.scaler = self._smp_make_scaler(rules)

    def _smp_make_scaler(self, rules: ScalingRules) -> GradScaler:
        return GradScaler(rules, lambda *given: self.smp.engine.unscale(*given), lambda: unwrapped(self._optimizers))

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare all of ``args``, in any order; the model is partitioned over the ranks at its first call."""
        models = [each for each in args if isinstance(each, nn.Module)]
        optimizers = unwrapped(each for each in args if isinstance(each, Optimizer))
        self._smp_models.begin(models, optimizers, unwrapped(self._optimizers))
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Route calls of ``model`` to the engine. Collective."""
        if getattr(model, "_is_accelerate_prepared", False):
            if not any(model is each for each in self._models):
                raise prepared_elsewhere(model)
            return model
        refuse_compiled(model)
        is_other = self._smp_is_other(model, evaluation_mode)
        config, handler = self.smp.config, self.ddp_handler
        if handler is not None and not handler.broadcast_buffers:  # replicas keep their own
            config = dataclasses.replace(config, broadcast_buffers=False)
        left = None if is_other else engine_left(model, config, self.smp.device, self.smp.timeout)
        if left is None:
            restore_left(model)
        own = vars(model).get("forward")
        # In evaluation mode Accelerate adds autocast only, and none of its own data parallelism.
        super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if left is None and (self.device_placement if device_placement is None else device_placement):
            # Meta tensors get their values later, on their own stage.
            model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))
        if is_other:
            read_now(model)
            self._smp_models.others.append(model)
            return model
        vars(model).pop("_original_forward", None)  # Accelerate's unwrap restores it, which would remove our `forward`
        engine = self.smp.begin_engine(config, left)
        note_settings(settings_of_accelerator(self), engine.ledger)
        engine.attach(model)
        engine.begins_empty = self.gradient_accumulation_steps == 1
        loader = ActiveLoader(self.smp, self.gradient_state)
        engine.known = loader.last_read
        engine.settings = lambda: {
            "`accelerator.gradient_accumulation_steps`": self.gradient_accumulation_steps,
            "the number of batches of the data loader": loader.num_batches(),
        }
        prediction = BackwardPrediction(
            scale=lambda: 1.0 if self.smp.scaler is None else self.smp.scaler.get_scale(),
            window=lambda: self.gradient_accumulation_steps,
            syncs=lambda: self.sync_gradients and not self.smp.syncs_blocked,
        )
        # `model.forward` now has Accelerate's autocast around it, which calls keep; `own` is what `remove` restores.
        hears = self.smp.main_calls.pass_by
        self.smp.calls = ModelCalls(model, engine, self._smp_options, prediction, loader.check_even, own, hears)
        self.smp.calls.install()
        lent = LentWeights(model, engine, self.smp.read_weights)
        engine.views.ask, self.smp.main_calls.moves_on = lent.ask, lent.end
        self.smp.main_calls.begin()
        give_no_sync(model, self.smp, self.no_sync)
        self._smp_unprepared = UnpreparedOptimizers(
            model,
            engine,
            lambda: unwrapped(self._optimizers),
            lambda: self.smp.scaler is not None,
            self._smp_refuse,
            self.smp.main_calls.update,
        )
        self._smp_attach()
        return model

    def _smp_is_other(self, model: nn.Module, evaluation_mode: bool) -> bool:
        """Whether ``model`` is kept whole on every rank. A partitioned one may give way to it. Collective."""
        models, holder = self._smp_models, None if self.smp.calls is None else self.smp.calls.model
        if next(model.parameters(), None) is None:
            return True
        if evaluation_mode:
            models.evaluates(model)
        prepared, first = unwrapped(self._optimizers), holder or models.chosen
        if models.may_stay_whole(model, prepared):
            return first not in (None, model)
        if holder is not None and models.may_stay_whole(holder, prepared) and has_values(holder):
            engine = self._smp_remove()
            assert engine is not None
            engine.restore_everywhere()
            engine.detach()
            self._smp_leave_partitioned(engine)
            models.others.append(holder)
        elif first is not None and first is not model:
            raise second_model(model, first)
        return False

    def _smp_refuse(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer of a whole model under replicas: its gradients are not averaged."""
        other = self._smp_models.other_of(optimizer)
        if self.smp.num_data_ranks > 1 and other is not None and self.smp.calls is not None:
            raise second_model(other, self.smp.calls.model)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap ``optimizer`` in an :class:`~smp_strategy.integrations.accelerate.optimizer.SMPOptimizer`."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        prepared = SMPOptimizer(
            optimizer,
            self.smp,
            device_placement=self.device_placement if device_placement is None else device_placement,
            scaler=self.smp.scaler,
            number=len(self._optimizers),
        )
        self._optimizers.append(prepared)
        self._smp_attach()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap ``scheduler`` in an :class:`~smp_strategy.integrations.accelerate.optimizer.SMPScheduler`."""
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
        """Register the prepared optimizers with the engine."""
        if self.smp.calls is None or not self._optimizers:
            return
        optimizers = unwrapped(self._optimizers)
        refuse_foreign(self.smp.calls.model, optimizers)
        self.smp.engine.attach(self.smp.calls.model, optimizers)

    # Between forward and the optimizer's step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as Accelerate does; raise the error of an asynchronous save that failed meanwhile."""
        self.smp.background.check()
        if self.sync_gradients and not self.smp.syncs_blocked:
            self.smp.main_calls.finish()
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context whose calls do not end the accumulation window."""
        self.smp.syncs_blocked += 1
        try:
            yield
        finally:
            self.smp.syncs_blocked -= 1

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, if the loss was scaled and they are not unscaled yet. Collective."""
        if self.smp.scaler is None or not self.smp.has_engine:
            return
        self.smp.engine.reduce_gradients()
        given = self._optimizers if optimizer is None else optimizer
        for each in unwrapped(given if isinstance(given, (tuple, list)) else [given]):
            self.smp.scaler.ensure_unscaled(each)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip by the global norm over the gradients of all ranks; return the norm before clipping. Collective."""
        if not self._smp_is_partitioned():
            norm: Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        self._smp_make_final()
        return self.smp.engine.clip_grad_norm_(_listed(parameters), max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each element of the gradients. Collective."""
        if not self._smp_is_partitioned():
            super().clip_grad_value_(parameters, clip_value)
            return
        self._smp_make_final()
        with self.smp.engine.views.put_aside():
            torch.nn.utils.clip_grad_value_(_listed(parameters), clip_value)

    def _smp_is_partitioned(self) -> bool:
        return self.smp.has_engine and self.smp.engine.partition is not None

    def _smp_make_final(self) -> None:
        """Reduce gradients over ranks and unscale them."""
        calls = self.smp.main_calls
        if self.sync_gradients:
            calls.finish()
        else:  # no update follows
            calls.update()
        self.smp.engine.reduce_gradients()
        self.unscale_gradients()

    # The end

    def free_memory(self, *objects: Any) -> Any:
        """Release everything that is prepared; a model stays spread over the ranks until it is prepared again."""
        self.smp.main_calls.end()
        self.smp.background.wait()  # asynchronous saves need process groups of the engine
        for model in self._models:
            vars(model).pop("_is_accelerate_prepared", None)
        self._smp_models.clear()
        if (engine := self._smp_remove()) is not None:
            engine.detach(restores=False)  # takes no memory
            self._smp_leave_partitioned(engine)
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """End trackers, and restore the model as option ``restore_module`` says. Collective."""
        self.smp.main_calls.end()
        self.smp.settle()
        self._smp_models.clear()
        if (engine := self._smp_remove()) is not None:
            engine.detach()
            self._smp_leave_partitioned(engine)
        super().end_training()

    def _smp_remove(self) -> Engine | None:
        """Undo all changes to the model, if one is prepared."""
        if self.smp.calls is None:
            return None
        assert self._smp_unprepared is not None
        self._smp_unprepared.end()
        self.smp.calls.remove()
        take_no_sync(self.smp.calls.model)
        return self.smp.engine

    def _smp_leave_partitioned(self, engine: Engine) -> None:
        assert self.smp.calls is not None
        if leave_spread(self.smp.calls.model, engine):
            self.smp.let_go()
        self.smp.calls = self._smp_unprepared = None
        self.smp.close()

    def _smp_leave(self) -> bool:
        """Close everything when the process ends; whether process groups are to be dropped."""
        try:
            self.smp.background.wait()
        except Exception as error:
            warnings.warn(f"A checkpoint was not saved: {error}", stacklevel=1)
        if has_crashed():  # other ranks may never come to a collective
            return False
        with suppress(RuntimeError):  # a rank that has failed says so itself
            self.smp.main_calls.end()
            self.smp.main_calls.arrive()
        self.smp.close()
        return True


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
