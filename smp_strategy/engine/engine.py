"""The engine: the only file that knows every part.

Life of a model under the engine:

1. :meth:`Engine.attach`: choose units, build the mesh, make initial values equal on all ranks. Every rank still
   holds the whole model, so optimizers, callbacks and checkpoints meet an ordinary module.
2. The first step: its microbatch is traced without computing, the partition is decided and every rank lets go of the
   units of other stages.
3. Every step: cut the batch, run the user's step once per microbatch under the schedule, hand out the results.
4. :meth:`Engine.detach`: the module becomes an ordinary one again, on every rank that asks for it.

Gradients are handed over separately (:meth:`TrainStep.commit`), because in Lightning and Accelerate the step comes
first, then ``zero_grad``, then ``backward``.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.grad_norm import UnscaleResult
from smp_strategy.distributed.device import chosen
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine import active_engines as attached
from smp_strategy.engine import new_step_kinds, run_step
from smp_strategy.engine.commands.profiling_run import profiled
from smp_strategy.engine.deferred_loss import ForwardStep
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.figures.inspection import Inspection
from smp_strategy.engine.figures.microbatch_notes import told_of_microbatches
from smp_strategy.engine.first_attach import begin_layout, lay_out, serves, start_alike
from smp_strategy.engine.hooks.run_hook import run_hook
from smp_strategy.engine.hooks.views import Views
from smp_strategy.engine.layout import Layout
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.engine.manual_optimization import ManualSteps
from smp_strategy.engine.new_step_kinds import FirstStep
from smp_strategy.engine.parallelize import make_whole_again, parallelize, resume
from smp_strategy.engine.repeated_step import StateBefore
from smp_strategy.engine.run_outcome import RunOutcome
from smp_strategy.engine.saving.checkpointing import SavedState
from smp_strategy.engine.step_results import EvalStep, TrainStep
from smp_strategy.errors import SMPError
from smp_strategy.model.samples import BatchSource
from smp_strategy.pipeline.job import Job, Step, StepRun
from smp_strategy.pipeline.shared_tensors.glue_parameters import NewUseError
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.precision.dtypes import halve
from smp_strategy.precision.master_weights import parameters_without_masters, refuse_trained
from smp_strategy.tensor_parallel.sharded_tensor.parts import put_together

__all__ = ["Engine", "ProcessMesh"]  # with the type of an attribute, for annotations

LossOf = Callable[[Any], Tensor | None]


@final
class Engine:
    """Runs a module under the layout that a configuration asks for. One engine serves one module.

    Args:
        report: called with text for the user (mesh and partition, then the schedule), the same on every rank.
        defaults: names of options that the door has set, and not the user.

    Attributes:
        config, timeout, device: as given; the device is that of this rank.
        saved: saves and loads the state of the module, of optimizers, and of the engine.
        inspection: explanation of the partition, timelines, memory reports.
        manual: backward and optimizer steps of a :meth:`manual_step`.
        copies: returns the module copies that callbacks hold (EMA weights), which are partitioned with the module.
        known: returns the data loader's facts about the samples in the next batch.
        settings: returns settings that ranks compare at each update, beside those of the optimizer.
        num_updates: number of steps of optimizers so far.
        outcome: errors that have ended a step, a backward or an update of this run.
    """

    def __init__(
        self,
        config: SMPConfig,
        *,
        report: Callable[[str], None] = lambda text: None,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        defaults: Collection[str] = (),
    ) -> None:
        self.config, self.timeout = profiled(config), timeout
        self.device = chosen(device)
        self._parts = EngineParts(self.config, self.device, timeout, report)
        self._parts.chosen |= set(defaults)
        self._calls, self.ledger = self._parts.calls, self._parts.ledger
        self.saved = SavedState(self._parts)
        self.inspection = Inspection(self._parts)
        self._without_masters: Mapping[str, nn.Parameter] = {}
        self.manual = ManualSteps(self._calls)
        self.copies: Callable[[], Iterable[nn.Module]] = tuple
        self.known: Callable[[], BatchSource | None] = lambda: None
        self.settings: Callable[[], Mapping[str, object]] = dict
        self.num_updates, self.outcome = 0, RunOutcome()
        self._kinds, self._sizes = set[str](), tuple[int, ...]()  # of steps; samples in each microbatch

    # Setting up

    @property
    def mesh(self) -> ProcessMesh:
        """This rank's place among the ranks; exists once a module is attached."""
        return self._parts.mesh

    @property
    def module(self) -> nn.Module | None:
        """The attached module; it stays known after it is detached."""
        return self._parts.module

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Optimizers of the module."""
        return self._parts.optimizers

    @property
    def begins_empty(self) -> bool:
        """Whether each step begins without gradients, as far as is known; set it before the first step."""
        return self._parts.begins_empty

    @begins_empty.setter
    def begins_empty(self, is_empty: bool) -> None:
        self._parts.begins_empty = is_empty

    @property
    def gradients_are_seen(self) -> bool:
        """Whether the user looks at gradients between backward and the optimizer's step; set it before the first step.

        Otherwise a rank may have only those gradients that it applies.
        """
        return self._parts.gradients_are_seen

    @gradients_are_seen.setter
    def gradients_are_seen(self, are_seen: bool) -> None:
        self._parts.gradients_are_seen = are_seen
        if self._parts.local_model is not None:
            self._parts.local_model.show_gradients(everyone=are_seen)

    @property
    def is_attached(self) -> bool:
        """Whether calls of units are intercepted."""
        return self._calls.are_intercepted

    @property
    def is_tracing(self) -> bool:
        """Whether code of a step runs dry now."""
        program = None if self._calls.runtime is None else self._calls.runtime.current.interpreter
        return program is not None and program.is_dry_run

    @property
    def layout(self) -> Layout:
        """Decisions on the module: partition, split layers, plans, costs; exists once a module is attached."""
        return self._parts.layout

    @property
    def partition(self) -> Partition | None:
        """Stage of each unit, once it is decided."""
        return self._parts.partition

    @property
    def local_model(self) -> LocalModel:
        """This rank's part of the module; exists from the first step on."""
        return self._parts.spread

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        keep_shared: Sequence[nn.Module] = (),
        trains: bool = True,
        is_placed: bool = True,
    ) -> None:
        """Attach ``module``, which is whole on every rank; collective. A detached module is partitioned as before.

        Args:
            keep_shared: modules in it whose attributes add up over microbatches (metrics), see
                :mod:`smp_strategy.pipeline.isolation.microbatch_state`.
            trains: whether there will be training steps. ``module`` may be as :meth:`stays_spread` says.
            is_placed: whether modules that the user places are placed already, and not at the first step at the latest.

        Raises:
            ConfigError: the degrees do not fit the number of ranks or of units, or the precision not the parameters.
            SMPError: the engine already serves another module.
        """
        if self._parts.module is not None and not self.serves(module):
            raise SMPError("This engine already serves another module. Use a new strategy object for a new module.")
        self._parts.optimizers = optimizers
        self._parts.keep_shared = keep_shared
        self._without_masters = parameters_without_masters(module, self.config)
        if optimizers:
            refuse_trained(self._without_masters, self.config)
        if self._calls.are_intercepted:
            if self._calls.runtime is not None:
                self.local_model.take_optimizers(optimizers)
            return
        if self.stays_spread(module, trains=trains):
            self._calls.intercept(self.layout.units, module)
            resume(self._parts)
            attached.note(self)
            return
        self.restore_everywhere()
        self.outcome = RunOutcome()
        if self.config.fp16_params:
            halve(module, torch.float16)
        seed = start_alike(module, self.ledger, may_lack_values=self.config.delayed_parameter_initialization)
        if self._parts.module is None:
            begin_layout(self._parts, module, seed, is_placed=is_placed)
        self._calls.intercept(self.layout.units, module)
        attached.note(self)

    def stays_spread(self, module: nn.Module, *, trains: bool = False) -> bool:
        """Whether no rank has all of ``module`` since the last run, and the next one begins with that.

        Args:
            trains: whether the next run trains. Then ``module`` must have been built without values, and the last run
                must have ended well.
        """
        local, is_delayed = self._parts.local_model, self.config.delayed_parameter_initialization
        if not is_delayed or local is None or not local.is_spread_as_made or not self.serves(module):
            return False
        return not trains or (self._parts.delayed.has_made_values and not self.outcome.has_failed)

    def serves(self, module: nn.Module) -> bool:
        """Whether ``module`` is the attached one, with the same units and the same stages set by hand."""
        return serves(self._parts, module)

    def detach(self, *, failed: bool = False, restores: bool = True) -> None:
        """Give the module back; :meth:`attach` takes it again. Collective unless the run has failed.

        Calls reach the module directly again, and the ranks that ``restore_module`` names get all of its values back.
        The state of the optimizers stays where it is.

        Args:
            failed: the other ranks may not come here; the module stays as it is.
            restores: whether values are given back; otherwise the module stays as it is.
        """
        local_model = self._parts.local_model
        is_broken = local_model is not None and local_model.end_broken_update()
        self.outcome.end(failed=failed, has_broken_update=is_broken)
        self._calls.give_back()
        self._parts.pending.give_optimizers()
        if failed:
            self.ledger.clear()
        elif restores and local_model is not None:
            local_model.restore(self.config.restored_on)

    @property
    def is_spread(self) -> bool:
        """Whether ranks lack values of the module."""
        return self._parts.is_spread

    @property
    def views(self) -> Views:
        """Views of the full model for the user's hooks."""
        return self._parts.views

    def restore_everywhere(self) -> None:
        """Give every rank the whole module, whatever the options say. Collective."""
        if self._parts.local_model is not None:
            self._parts.local_model.restore("all")

    # The first step

    def _prepare(self, first: FirstStep) -> None:
        """Prepare a step: partition the module if it is whole, and trace each new kind of step."""
        assert self._parts.module is not None
        kind = first.kind
        was_surveyed, is_new = self.partition is not None and not self.config.skip_tracing, kind not in self._kinds
        self._kinds.add(kind)
        if kind in ("train", "manual"):
            refuse_trained(self._without_masters, self.config)
            if is_new:
                new_step_kinds.refuse_rescaled(self._parts)
                run_step.warn_of_fewer(self._parts.config, len(first.microbatches))
        if self._calls.mixed_precision is not None:
            self._calls.mixed_precision.refresh()
        if self.partition is None:
            lay_out(self._parts)
        if self._calls.runtime is None:
            # Copies are named now, while they look like the module.
            local_model = parallelize(self._parts, first, list(self.copies()))
            self.manual.begin(local_model.holdings, local_model.reduction)
        if was_surveyed and is_new and (new_step_kinds.needs_look(self._parts) or self.is_spread):
            self._look(first)
        if is_new:
            new_step_kinds.rehearse(self._parts, first)

    def _look(self, first: FirstStep) -> None:
        try:
            new_step_kinds.look(self._parts, first)
        except NewUseError as error:
            make_whole_again(self._parts, first, error)
            self._kinds.discard(first.kind)
            self._prepare(first)

    def look(self, step: Step, batch: Any, *, loss_of: LossOf) -> None:
        """Run ``step`` dry, without values, so that its author sees the result. Collective.

        Before the first step, the trace of this run decides the partition.
        """
        cut_batch = functools.partial(run_step.cut, self._parts, batch, "look", self.known)
        microbatches, sizes = cut_batch()
        first = FirstStep("train", self._in_precision(step), microbatches, loss_of, sizes, cut=cut_batch)
        with told_of_microbatches(sizes):
            if self._calls.runtime is None:
                self._prepare(first)
            else:
                self._look(first)

    # Every step

    def train_step(
        self,
        step: Step,
        batch: Any,
        *,
        loss_of: LossOf,
        factor: float = 1.0,
        continues: bool = False,
        reduces: bool = False,
        sums: bool = False,
    ) -> TrainStep:
        """Run forward and backward of a batch.

        Args:
            step: the user's code for one microbatch. At the first call it runs once more, as a dry run.
            batch: cut along dim 0 into microbatches.
            loss_of: picks the loss out of what ``step`` returns; ``None`` skips a microbatch.
            factor: the gradient that :meth:`TrainStep.commit` will probably get.
            continues: the gradients will probably be added to those that are there. If both guesses are right, the
                additions are those of one process in number and order.
            reduces: and it will be told to reduce: replicas may begin to, while gradients are computed.
            sums: the batch's loss is the sum of those of the microbatches, and not their mean over the samples.
        """
        step, microbatches, sizes = self._begin("train", step, batch, loss_of)
        job = run_step.training_job(self._parts, "train", step, microbatches, sizes, loss_of, sums=sums)
        with self.local_model.backward(continues=continues, sums=reduces and not continues) as backward:
            scaled = [weight * factor for weight in job.weights]
            run = self._run("train", replace(job, weights=scaled, around_last=backward.around_last), microbatches)
        outputs, loss, reduction = put_together(run.outputs), run.loss(job.weights), self.local_model.reduction
        return TrainStep(outputs, sizes, loss, backward.gradients, factor, reduction, backward.averages)

    def _begin(
        self, kind: str, step: Step, batch: Any, loss_of: LossOf | None = None, *, num: int | None = None, **how: Any
    ) -> tuple[Step, list[Any], tuple[int, ...]]:
        """Prepare a step; returns ``step`` in its precision, the microbatches (``num`` of them) and their sizes."""
        cut_batch = functools.partial(run_step.cut, self._parts, batch, kind, self.known, **how)
        step = self._in_precision(step)
        first = FirstStep(kind, step, [], loss_of, takes_turns=num != 1, cut=cut_batch)
        microbatches, self._sizes = run_step.begin(self._parts, first, num, self._prepare)
        return step, microbatches, self._sizes

    def eval_step(
        self, step: Step, batch: Any, *, kind: str = "eval", as_in_training: bool = False, **how: Any
    ) -> EvalStep:
        """Run forward of a batch, in ``evaluation_microbatches`` microbatches.

        Args:
            step: the user's code for one microbatch.
            batch: cut along dim 0 into microbatches.
            kind: steps of one kind share a schedule; say ``"validation"`` or ``"predict"``.
            as_in_training: as many microbatches as in training.
            how: ``is_joint`` and ``inputs``, see :func:`smp_strategy.engine.run_step.cut`.
        """
        num = None if as_in_training else self.config.evaluation_microbatches
        step, microbatches, sizes = self._begin(kind, step, batch, num=num, **how)
        with self.local_model.evaluating(), run_step.memory_explained(len(sizes)):
            run = self._run(kind, run_step.evaluation_job(self._parts, kind, step, microbatches, sizes), microbatches)
        return EvalStep(put_together(run.outputs), sizes)

    def call_whole(self, function: Callable[[], Any]) -> Any:
        """Call code that needs no gradients, on a rank that has the whole module; no step, so it runs as it is."""
        with self.local_model.evaluating():
            return self._in_precision(lambda _: function())(None)

    def manual_step(self, step: Step, batch: Any) -> EvalStep:
        """Run a step that calls backward and optimizers itself, through :attr:`manual`; see :meth:`train_step`."""
        step, microbatches, sizes = self._begin("manual", step, batch)
        with self._stepping():
            run = self.manual.run(run_step.training_job(self._parts, "manual", step, microbatches, sizes), microbatches)
        return EvalStep(put_together(run.outputs), sizes)

    def forward_step(self, step: Step, batch: Any) -> ForwardStep:
        """Run forward of a batch whose loss the caller computes from the result of ``step``; see :meth:`train_step`."""
        step, microbatches, sizes = self._begin("manual", step, batch)
        job = run_step.training_job(self._parts, "manual", step, microbatches, sizes)
        with self._stepping():
            return self.manual.forward(job, microbatches, sizes, self.outcome.noted)

    def state_before(self, step: Step) -> StateBefore:
        """State of the module now, for running ``step`` again later; exists once :meth:`look` has run."""
        return StateBefore(self._parts, step)

    def _in_precision(self, step: Step) -> Step:
        return step if self._calls.mixed_precision is None else self._calls.mixed_precision.around_step(step)

    def _run(self, kind: str, job: Job, microbatches: Sequence[Any]) -> StepRun:
        with self._stepping():
            return run_step.run_step(self._parts, kind, job, microbatches)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        with self.outcome.noted(), told_of_microbatches(self._sizes), self._parts.carried.explained():
            yield
            run_step.finish(self._parts)

    def call_with_values(self, function: Callable[..., Any], args: Any, kwargs: Any, *, unknown: Any) -> Any:
        """Call ``function`` in a step, on every stage, with real tensors instead of placed ones; in a dry run, where
        nothing has a value, ``unknown``.
        """
        if self._calls.runtime is None:
            return function(*args, **kwargs)
        return self._calls.runtime.current.call_with_values(function, args, kwargs, unknown=unknown)

    def watch_calls_outside(self, watch: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Let ``watch(unit, call)`` answer calls of units outside of steps, also before the first step."""
        self._calls.outside = watch

    # Gradients

    def reduce_gradients(self) -> None:
        """Sum up over stages, and average over replicas, gradients added since the last call. Collective.

        :meth:`TrainStep.commit` can do so as part of a step.
        """
        self._parts.reduce_gradients()

    def unscale(self, optimizer: Optimizer, scale: float) -> UnscaleResult:
        """Divide the final gradients of ``optimizer`` by ``scale``, for a gradient scaler.

        Collective over all ranks; each learns whether any gradient on any rank has overflowed.
        """
        with self.views.put_aside():
            return self.inspection.checked(self.local_model.unscale(optimizer, scale), is_scaled=scale != 1.0)

    def begin_update(self, optimizer: Optimizer) -> Tensor | None:
        """Call when gradients are final and only ``optimizer`` will read them before :meth:`end_update`; returns their
        norm before `sdp_gradient_clipping` has clipped them, ``None`` without that option.
        """
        local_model = self._parts.local_model
        return None if local_model is None else local_model.begin_update(optimizer, self.settings())

    def end_update(self, optimizer: Optimizer) -> None:
        """Call after the step of ``optimizer``: its parameters are broadcast asynchronously. Collective."""
        self.num_updates += 1
        if self._parts.local_model is not None:
            self._parts.local_model.end_update(optimizer)
        if self._calls.mixed_precision is not None:
            self._calls.mixed_precision.refresh()

    @contextmanager
    def changing_weights(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which ``optimizer`` changes weights without a step: it sees those that it updates. Collective."""
        if self._parts.local_model is None:
            yield
            return
        with self.views.put_aside(), self._parts.local_model.changing_weights(optimizer):
            yield
        if self._calls.mixed_precision is not None:
            self._calls.mixed_precision.refresh()

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a global norm of at most ``max_norm``; returns the norm before scaling, on every rank.

        ``parameters`` is the same list on every rank, as an optimizer has it.
        """
        with self.views.put_aside():
            return self.local_model.clip_grad_norm_(list(parameters), max_norm, norm_type)

    def run_hook(self, hook: Callable[[], Any]) -> Any:
        """Run the user's ``hook`` with the full weights and gradients; collective over the ranks that have them. Its
        result has real tensors on every rank.
        """
        return run_hook(self._parts, hook)

    def close(self) -> None:
        """End the engine's threads and free its process groups; the module stays as it is. May be called again."""
        attached.forget(self)
        self._calls.close()
        self.manual, self._parts.views = ManualSteps(self._calls), Views()  # the last ones know the groups
        layout = self._parts.known_layout
        for each in (self.saved, self._parts.local_model, getattr(layout, "group", None), self._parts.known_mesh):
            if each is not None:
                each.close()
        self._parts.local_model = None
