"""The Lightning ``Strategy``: set-up, steps, data and tear-down of a run.

No parallel logic stands here. The engine knows the mesh, the model and the schedule; each neighbouring file knows one
subject. Calls that a single part answers are in :mod:`smp_strategy.integrations.lightning.delegating_strategy`.
Lightning's order of calls in ``fit``::

    Trainer(...)            set_world_ranks, _configure_launcher
    launcher.launch         setup_environment            the process group
                            user's setup, configure_model, restore of weights from ckpt_path
                            setup                        engine.attach: the mesh; optimizers, refusals
                            process_dataloader           per loader
    per batch               batch_to_device, training_step, [zero_grad], backward: see [Note: commit];
                            under manual optimization all of it in training_step: see manual_optimization.py
    checkpoints             lightning_module_state_dict, optimizer_state, save_checkpoint: see checkpoint_hooks.py
    end                     teardown                     the module is whole again

``fit``, ``validate``, ``test`` and ``predict`` repeat this order, so every hook may be called several times. The first
step partitions the model, on real shapes; until then every rank has the whole model.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Unpack

import torch
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.keywords import OptionKeywords
from smp_strategy.config.option_signature import with_option_docs, with_option_signature
from smp_strategy.config.parsing import as_timeout
from smp_strategy.engine.data_readers import BatchSource
from smp_strategy.engine.degrees import check_degrees
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.left_sharded import engine_left, leave_spread, restore_left
from smp_strategy.engine.lifecycle.run_lifecycle import fail_run, leave_at_exit
from smp_strategy.engine.pretrained import deferring
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.optimizer_steps import (
    evaluated_once,
    has_step_hooks,
    hooks_around_step,
    switching_together,
)
from smp_strategy.errors import PeerFailedError
from smp_strategy.integrations.lightning import steps
from smp_strategy.integrations.lightning.checkpoint_hooks import unwrap
from smp_strategy.integrations.lightning.data import DataRngSync, following
from smp_strategy.integrations.lightning.delegating_strategy import DelegatingStrategy
from smp_strategy.integrations.lightning.environment import devices_of_launcher, submitit_environment
from smp_strategy.integrations.lightning.joining import join_group, meet_first, settings_of_run, settings_of_steps
from smp_strategy.integrations.lightning.launcher import make_launcher, start_new_job
from smp_strategy.integrations.lightning.manual_optimization import ManualOptimization
from smp_strategy.integrations.lightning.metrics import MetricUpdates, metrics_of
from smp_strategy.integrations.lightning.monitor_callback import monitored
from smp_strategy.integrations.lightning.precision_plugin import (
    for_all_ranks,
    forget_gradients,
    make_scaler,
    passing_over_skipped,
)
from smp_strategy.integrations.lightning.resume import Resumption
from smp_strategy.integrations.lightning.sigterm import StopSignal, end_as_stopped
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.integrations.lightning.user_hooks import UserHooks, copies_module, copies_of
from smp_strategy.integrations.lightning.validation import grows_later, refuse_unsupported
from smp_strategy.integrations.lightning.world_size import asked_by_lightning, asked_to_make_data, find_replica

__all__ = ["StrategyHooks", "make_strategy"]


class StrategyHooks(DelegatingStrategy):
    """Train an unmodified LightningModule with its layers spread over pipeline ranks.

    Example::

        strategy = SMPStrategy(pipeline_parallel_degree=2, microbatches=8)
        trainer = Trainer(devices=2, accelerator="cpu", strategy=strategy)
        trainer.fit(module, datamodule)

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: the Trainer fills them in.
        process_group_backend: default: gloo, plus torch's default backend for accelerators that no ranks share.
        timeout: timeout of the process groups, a timedelta or seconds; default: torch's.
        options: fields of ``SMPConfig``; the ``SMP_*`` environment has their defaults.

    Raises:
        ConfigError: an option is unknown, wrong or contradicts another; one error lists all of them.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        start_new_job()
        super().__init__(
            SMPConfig.from_options(**options),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or submitit_environment(self.tree),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self.timeout = as_timeout(timeout)
        self._data_stream: DataRngSync | None = None
        self._manual: ManualOptimization | None = None
        self._stop_signal: StopSignal | None = None
        self._patches = ExitStack()  # methods replaced for one run; closing it restores them
        self._may_reduce = True
        self._forgets_early = False
        self._is_joint = True
        self._read: BatchSource | None = None  # source of the batch that was moved last
        self._has_failed = False
        leave_at_exit(self.leave)

    def __repr__(self) -> str:
        # Lightning prints this when a Trainer of the other tree rejects the strategy.
        other = "pytorch_lightning" if self.tree.root == "lightning.pytorch" else "lightning"
        return (
            f"SMPStrategy for {self.tree.root} (for a Trainer of the other Lightning package use "
            f"smp_strategy.{other}.SMPStrategy)"
        )

    # Processes

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether several replicas share the data; Lightning asks this before it reduces logged values."""
        return self.mesh is not None and self.distributed_sampler_kwargs["num_replicas"] > 1

    @property
    def num_processes(self) -> int:
        """Ranks on this machine; to user code, replicas. See :mod:`smp_strategy.integrations.lightning.world_size`."""
        num_ranks = len(self.parallel_devices) if self.parallel_devices is not None else 0
        if asked_by_lightning() or not num_ranks:
            return num_ranks
        return max(1, self._replica(num_ranks * self.num_nodes)[0] // self.num_nodes)

    @property
    def world_size(self) -> int:
        """Ranks on all machines; to user code, replicas."""
        num_ranks: int = super().world_size
        return num_ranks if asked_by_lightning() else self._replica(num_ranks)[0]

    @property
    def global_rank(self) -> int:
        """This rank among all; to user code that makes data, this replica among all."""
        rank: int = super().global_rank
        return self._replica(int(super().world_size), rank)[1] if asked_to_make_data() else rank

    def _replica(self, num_ranks: int, rank: int = 0) -> tuple[int, int]:
        """The number of replicas, and the index of the replica that ``rank`` belongs to."""
        if self._data_stream is not None:
            kwargs = self.distributed_sampler_kwargs
            return int(kwargs["num_replicas"]), int(kwargs["rank"])
        return find_replica(self.config, self.lightning_module, num_ranks, rank)

    def set_world_ranks(self) -> None:
        """Set global rank and world size; called when the Trainer has set devices and environment."""
        environment = self.cluster_environment
        if environment is None:
            return
        if environment.creates_processes_externally and self.parallel_devices:
            self.parallel_devices = devices_of_launcher(self.parallel_devices)
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        # Some environments ignore the setters, so ask them back.
        self.tree.pytorch("utilities.rank_zero").rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self.tree, self.cluster_environment, self.num_processes, self.num_nodes)

    def refuse_before_start(self, trainer: Any) -> None:
        """Validate the degrees before other ranks are started, as far as the module is known by then."""
        module = self.lightning_module
        is_whole = module is not None and not grows_later(trainer, module, self.tree)
        check_degrees(self.config, self.num_nodes * self.num_processes, module if is_whole else None)

    def setup_environment(self) -> None:
        """Join the process group."""
        module = self.lightning_module
        assert module is not None
        settings = settings_of_run(module.trainer, self.tree)
        store = meet_first(module.trainer, settings)
        super().setup_environment()
        self.set_world_ranks()
        # No second seeding, unlike Lightning's own strategies: a single process does not seed twice, and its data order
        # is promised. See [Note: data stream].
        join_group(self, settings, store)
        self._has_failed = False
        self._checkpoints.begin_processes()
        self._take_up(module, module.trainer)

    def _take_up(self, module: Any, trainer: Any) -> None:
        """Begin with ``module`` as an earlier run has left it, or make it whole. Collective."""
        trains = self._is_fitting(trainer)
        # Callbacks that copy the module in `setup` need an ordinary one.
        copied = trains and any(copies_module(callback) for callback in trainer.callbacks)
        engine = None if copied else engine_left(module, self.config, self.root_device, self.timeout, trains=trains)
        if engine is None:
            restore_left(module)
            return
        self._engine = engine
        # The user's set-up meets the module as in a first run. `setup` ends this.
        self._patches.enter_context(engine.saved.looking_as_built())

    # Model and optimizers

    def setup(self, trainer: Any) -> None:
        """Build the optimizers and attach module and optimizers to the engine."""
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        states = self.tree.pytorch("trainer.states")
        fitting = self._is_fitting(trainer)
        self._patches.close()
        self._engine = self._engine_for(module)
        self.model = module
        if not self._engine.stays_spread(module, trains=fitting):
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
        self._engine.attach(module, trains=fitting)
        # Lightning divides samples for `predict` unevenly, but ranks that exchange samples need equally many batches.
        self._is_joint = self.config.prescaled_batch or trainer.state.fn == states.TrainerFn.PREDICTING
        stream = self._data_stream = DataRngSync(
            self._engine, is_joint=self._is_joint, shares=self.config.share_batches
        )
        self._resume.begin_run(Resumption(stream, self.root_device, self.tree) if fitting else None)
        if fitting:
            # After the data stream exists: `estimated_stepping_batches` makes the loaders.
            with self._engine.saved.looking_as_built():
                self.setup_optimizers(trainer)
        refuse_unsupported(trainer, module, self.optimizers, spreads=self._engine.mesh.spreads_model)
        self.setup_precision_plugin()
        self._engine.attach(
            module, [unwrap(optimizer) for optimizer in self.optimizers], keep_shared=metrics_of(module), trains=fitting
        )
        if self._engine.mesh.dp == 1:
            # All ranks log the same values: there is nothing to synchronise, whatever Lightning recommends.
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        self._engine.known = lambda: self._read
        self._engine.copies = lambda: copies_of(module, trainer.callbacks)
        self._engine.settings = lambda: settings_of_steps(trainer)
        self._checkpoints.begin_run(trainer, self._patches)
        self._install_patches(trainer, module, is_manual=fitting and not module.automatic_optimization)
        signal = StopSignal.of(trainer, self._engine, self.tree)
        if signal is not None:
            self._patches.enter_context(signal.installed())
            self._stop_signal = None if trainer.state.fn == states.TrainerFn.PREDICTING else signal

    def _install_patches(self, trainer: Any, module: Any, *, is_manual: bool) -> None:
        """Patch methods of metrics, hooks, optimizers and schedulers for this run, on the instances."""
        updates = MetricUpdates(self.engine, module)
        self._patches.callback(lambda: updates.remove(failed=self._has_failed))
        updates.install()
        self._checkpoints.looking_plain = updates.lifted
        hooks = UserHooks(self.engine, module, self.tree, self._checkpoints.with_values)
        self._patches.callback(hooks.remove)
        hooks.install(trainer.callbacks)
        are_seen_in_step = any(has_step_hooks(unwrap(each)) for each in self.optimizers)
        self.engine.gradients_are_seen = is_manual or hooks.see_gradients or are_seen_in_step
        self._forgets_early = not hooks.see_old_gradients
        scheduler = self.tree.pytorch("callbacks").GradientAccumulationScheduler
        accumulates = trainer.accumulate_grad_batches > 1 or any(isinstance(c, scheduler) for c in trainer.callbacks)
        self.engine.begins_empty = self._forgets_early and not is_manual and not accumulates
        is_guarded = bool(self.optimizers) and not is_manual
        self._patches.enter_context(monitored(self, trainer.callbacks, is_guarded=is_guarded))
        pairs = zip(map(unwrap, self.optimizers), self._lightning_optimizers, strict=True)
        self._patches.enter_context(switching_together(self.engine, pairs))
        scaler = self.precision_plugin.scaler
        if is_manual:
            self._manual = ManualOptimization(self.engine, module, self.precision_plugin.train_step_context, scaler)
            self._patches.callback(self._manual.remove)
            self._manual.install(
                self.optimizers, self._lightning_optimizers, [config.scheduler for config in self.lr_scheduler_configs]
            )
        elif scaler is not None:
            schedulers = passing_over_skipped(module, scaler, self.optimizers, self.lr_scheduler_configs)
            self._patches.enter_context(schedulers)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Enter the meta device around `configure_model` if `delayed_parameter_initialization` is set.

        Pretrained values are read later.
        """
        with ExitStack() as stack:
            stack.enter_context(super().tensor_init_context(empty_init))
            if self.config.delayed_parameter_initialization:
                stack.enter_context(torch.device("meta"))
                stack.enter_context(deferring())
            yield

    def model_to_device(self) -> None:
        """Move the whole model; the engine moves parts after partitioning, and meta tensors when they get values."""
        assert self.model is not None
        device = self.root_device
        if any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers())):
            self.tree.fabric("utilities.device_dtype_mixin")._update_properties(self.model, device=device)
            self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        else:
            self.model.to(device)

    def _is_fitting(self, trainer: Any) -> bool:
        return bool(trainer.state.fn == self.tree.pytorch("trainer.states").TrainerFn.FITTING)

    def _engine_for(self, module: Any) -> Engine:
        """The engine of the last run, if it fits ``module`` as it is now, or a new one."""
        if self._engine is not None and self._engine.serves(module):
            return self._engine
        tell = self.tree.pytorch("utilities.rank_zero").rank_zero_info
        # A progress bar may stand on the current line.
        return Engine(self.config, report=lambda text: tell(f"\n{text}"), device=self.root_device, timeout=self.timeout)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin; it scales losses and clips gradients by values that all ranks agree on."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            plugin = for_all_ranks(
                plugin,
                self.tree,
                lambda *arguments: self.engine.clip_grad_norm_(*arguments),
                lambda optimizer: self.engine.begin_update(unwrap(optimizer)),
                self._scaler_of,
            )
        self._precision_plugin = plugin

    def _scaler_of(self, plugin: Any) -> GradScaler | None:
        return make_scaler(
            plugin, self.config, lambda *given: self.engine.unscale(*given), lambda: map(unwrap, self.optimizers)
        )

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of all microbatches. See [Note: commit]."""
        module, batch = self.lightning_module, (*args, *kwargs.values())
        assert module is not None
        self._checkpoints.check()
        context = self.precision_plugin.train_step_context
        if self._manual is not None:
            self._resume.has_stepped = False
            with self._checkpoints.in_step():
                return steps.run_manual_step(self.engine, module, batch, context=context)
        number, length = steps.accumulation_window(module.trainer)
        if number == 0 and self._forgets_early:
            forget_gradients(map(unwrap, self.optimizers))
        scaler = self.precision_plugin.scaler
        with self._checkpoints.in_step():
            return steps.run_training_step(
                self.engine,
                module,
                batch,
                context=context,
                reduce=lambda: self._may_reduce,
                continues=number > 0,
                factor=(1.0 if scaler is None else scaler.get_scale()) / length,
            )

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Backward of a step's loss, or, under manual optimization, of the losses of all microbatches."""
        plain = super().backward
        if self._manual is None or not self.engine.manual.is_in_step:
            return plain(closure_loss, optimizer, *args, **kwargs)
        return self._manual.backward(plain, closure_loss, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of all microbatches."""
        return self._eval_step("validation_step", self.precision_plugin.val_step_context, *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of all microbatches."""
        return self._eval_step("test_step", self.precision_plugin.test_step_context, *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of all microbatches."""
        return self._eval_step("predict_step", self.precision_plugin.predict_step_context, *args, *kwargs.values())

    def _eval_step(self, name: str, context: Any, *args: Any) -> Any:
        if self._stop_signal is not None and self.engine.mesh.dp == 1:  # replicas may differ in their number of batches
            self._stop_signal.check()
        with self._checkpoints.in_step():
            module, is_joint = self.lightning_module, self._is_joint
            return steps.run_eval_step(self.engine, module, name, args, context=context, is_joint=is_joint)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the optimizer, which may evaluate the loss once; a user's hook of the same name may enclose the call."""
        in_sight = self._manual is None or self.engine.mesh.pp == 1  # inside a step there are no views
        around = hooks_around_step(self.engine, unwrap(optimizer), in_sight=in_sight)
        with around, self._checkpoints.in_step(), self.engine.views.put_aside():
            if self._manual is not None:
                self._manual.reduce(optimizer)
            result = super().optimizer_step(optimizer, evaluated_once(closure, optimizer), model, **kwargs)
            self.engine.end_update(unwrap(optimizer))
            self._resume.has_stepped = True
            return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on this replica: batches in here do not end the accumulation window."""
        self._may_reduce = False
        try:
            yield
        finally:
            self._may_reduce = True

    # Data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Divide samples among replicas; with ``prescaled_batch=False`` also among tensor-parallel ranks."""
        mesh = self.engine.mesh
        number, rank = mesh.shape.reader_of(mesh.rank, is_joint=self._is_joint)
        return {"num_replicas": number, "rank": rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Synchronise the random draws of a replica's ranks. See [Note: data stream]."""
        if not isinstance(dataloader, torch.utils.data.DataLoader):
            return dataloader
        assert self._data_stream is not None
        twin = following(dataloader, self._data_stream, self.tree, dp_rank=self.distributed_sampler_kwargs["rank"])
        self._resume.restore_evaluation_loader(twin)
        return twin

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the batch with the user's transfer hooks, whose random draws belong to the data stream."""
        if self._data_stream is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        batch, self._read = self._data_stream.agreed(batch, self._data_stream.read_of(batch))
        with self._data_stream.draws():
            return super().batch_to_device(batch, device, dataloader_idx)

    # The end

    def on_train_end(self) -> None:
        """End the run if SIGTERM came in the last step, before anything is released."""
        if self._stop_signal is not None:
            self._stop_signal.end()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Publish the error to the other ranks, and end child processes that wait for this one."""
        self._has_failed = True
        end_as_stopped(exception, self.tree)
        fail_run(exception)
        if self._launcher is not None:
            # Ranks that only wait for this one cannot notice the error while it lives, and have none of their own.
            patience = 5.0 if isinstance(exception, PeerFailedError) else 1.0
            self._launcher.end_children(patience)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """End one of fit, validate, test, predict; another may follow. The module becomes an ordinary one."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._checkpoints.end_run(failed=self._has_failed)
        self._patches.close()
        self._manual = self._stop_signal = None
        if self._engine is not None:
            self._engine.detach(failed=self._has_failed)
            leave_spread(self.lightning_module, self._engine)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def leave(self) -> bool:
        """Close the engine when the process ends; whether process groups are to be dropped."""
        if self._engine is None or self._has_failed:
            return False
        self._engine.close()
        return True


@functools.cache
def make_strategy(root: str) -> type[StrategyHooks]:
    """The class ``SMPStrategy`` for the Lightning tree ``root``.

    Signature and docstring name each option with its type, default and sentence, for LightningCLI and ``help()``.
    """
    tree, docs = Tree(root), with_option_docs(StrategyHooks.__doc__)
    init, base = with_option_signature(StrategyHooks.__init__), tree.pytorch("strategies.parallel").ParallelStrategy
    strategy: type[StrategyHooks] = tree.subclass("SMPStrategy", StrategyHooks, base, __init__=init, __doc__=docs)
    return strategy
