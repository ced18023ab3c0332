"""The strategy: what Lightning calls, hook by hook, and which part of the library answers.

No parallel logic stands here. The engine knows the mesh, the model and the schedule; the neighbours of this file know
one subject each. The order in which Lightning calls (fit)::

    Trainer(...)            set_world_ranks, _configure_launcher
    launcher.launch         setup_environment            the process group
                            user's setup, configure_model, restore of weights from ckpt_path
                            setup                        engine.attach: the mesh; optimizers, refusals
                            process_dataloader           per loader
    per batch               batch_to_device, training_step, [zero_grad], backward: see [Note: commit];
                            under manual optimization all of it in training_step: see manual.py
    checkpoints             lightning_module_state_dict, optimizer_state, save_checkpoint: see checkpoints.py
    end                     teardown                     the module is whole again

``fit``, ``validate``, ``test`` and ``predict`` each run through all of it, so every hook may be called again. The
model is partitioned inside the first step, on real shapes; until then it is whole on every rank.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.step_hooks import evaluated_once, has_step_hooks, hooks_around_step
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.failure import publish_own
from smp_strategy.distributed.malloc import keep_freed_memory
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.rng_sync import BatchSource
from smp_strategy.distributed.shutdown import call_at_exit
from smp_strategy.engine.degrees import check_degrees
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.left_sharded import leave_spread, restore_left
from smp_strategy.errors import PeerFailedError, SMPError
from smp_strategy.integrations.lightning import steps
from smp_strategy.integrations.lightning.checkpoint_hooks import CheckpointHooks, unwrap
from smp_strategy.integrations.lightning.data import DataRngSync, following
from smp_strategy.integrations.lightning.environment import backend_for, devices_of_launcher, submitit_environment
from smp_strategy.integrations.lightning.launcher import make_launcher, start_new_job
from smp_strategy.integrations.lightning.manual_optimization import ManualOptimization
from smp_strategy.integrations.lightning.metrics import MetricUpdates, metrics_of
from smp_strategy.integrations.lightning.optimizer_modes import switching_together
from smp_strategy.integrations.lightning.precision_plugin import (
    for_all_ranks,
    forget_gradients,
    make_scaler,
    passing_over_skipped,
)
from smp_strategy.integrations.lightning.resume import Resumption
from smp_strategy.integrations.lightning.sigterm import StopSignal, end_as_stopped
from smp_strategy.integrations.lightning.user_hooks import UserHooks, copies_of
from smp_strategy.integrations.lightning.validation import grows_later, refuse_unsupported
from smp_strategy.precision.grad_scaler import GradScaler
from smp_strategy.reports.explain.explanation import Explanation
from smp_strategy.reports.memory_report import MemoryReport
from smp_strategy.reports.timeline.timeline import Timeline

__all__ = ["StrategyHooks"]


class StrategyHooks(CheckpointHooks):
    """Train an unmodified LightningModule with its layers spread over pipeline ranks.

    Example::

        strategy = SMPStrategy(pipeline_parallel_degree=2, microbatches=8)
        trainer = Trainer(devices=2, accelerator="cpu", strategy=strategy)
        trainer.fit(module, datamodule)

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: the Trainer fills them in.
        process_group_backend: default: gloo, and for accelerators that no ranks share what torch recommends for them.
        timeout: of the process groups; default: torch's.
        options: fields of ``SMPConfig``; the ``SMP_*`` environment has their defaults.

    Raises:
        ConfigError: an option is unknown, wrong or contradicts another; all of them at once.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        start_new_job()
        self.config = SMPConfig.from_options(**options)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or submitit_environment(self.tree),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self._timeout = timeout
        self._engine: Engine | None = None
        self._data_stream: DataRngSync | None = None
        self._manual: ManualOptimization | None = None
        self._stop_signal: StopSignal | None = None
        self._stand_ins = ExitStack()  # closed at the end of a run, which gives back what was replaced for it
        self._may_reduce = True
        self._forgets_early = False
        self._is_joint = True
        self._read: BatchSource | None = None  # of the batch that was moved last
        self._has_failed = False
        call_at_exit(self.leave)

    def __repr__(self) -> str:
        # Lightning prints this when a Trainer of the other tree rejects the strategy.
        other = "pytorch_lightning" if self.tree.root == "lightning.pytorch" else "lightning"
        return (
            f"SMPStrategy for {self.tree.root} (for a Trainer of the other Lightning package use "
            f"smp_strategy.{other}.SMPStrategy)"
        )

    # Processes

    @property
    def engine(self) -> Engine:
        """The engine of the module that is being trained; exists from ``setup`` on."""
        if self._engine is None:
            raise SMPError(
                "The pipeline exists once the strategy is set up, after `setup` and `configure_model` of the module, "
                "but is needed before. Move what needs it to a later hook, e.g. `on_fit_start`."
            )
        return self._engine

    @property
    def mesh(self) -> ProcessMesh | None:
        """Where the ranks stand, or ``None`` before ``setup``."""
        return None if self._engine is None else self._engine.mesh

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step runs just now."""
        return self._engine is not None and self._engine.inspection.is_in_step

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether there are replicas that share the data and the logged values; asked for just that."""
        return self.mesh is not None and self.distributed_sampler_kwargs["num_replicas"] > 1

    def set_world_ranks(self) -> None:
        """Number the ranks; called when the Trainer has set devices and environment."""
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
        """Refuse what this run could not train, as far as that can be told when no other rank is started yet."""
        module = self.lightning_module
        is_whole = module is not None and not grows_later(trainer, module, self.tree)
        check_degrees(self.config, self.num_nodes * self.num_processes, module if is_whole else None)

    def setup_environment(self) -> None:
        """Join the other ranks."""
        super().setup_environment()
        self.set_world_ranks()
        # Unlike Lightning's own strategies this does not seed again: one process would not, and the data order of one
        # process is promised. See [Note: data stream].
        distributed = self.tree.fabric("utilities.distributed")
        backend = self.process_group_backend or backend_for(self.parallel_devices or [])
        options = {} if self._timeout is None else {"timeout": self._timeout}
        if is_host(self.root_device):
            keep_freed_memory()
        distributed._init_dist_connection(self.cluster_environment, backend, **options)
        self._has_failed = self._is_torn = False
        self._stopped_together = None
        # An earlier run may have left the module spread over the ranks. Everything from here on, callbacks that copy
        # it in `setup` for instance, meets an ordinary module.
        restore_left(self.lightning_module)

    # Model and optimizers

    def setup(self, trainer: Any) -> None:
        """Build the optimizers and hand everything to the engine."""
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        states = self.tree.pytorch("trainer.states")
        fitting = trainer.state.fn == states.TrainerFn.FITTING
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._engine = self._engine_for(module)
        self._engine.attach(module)
        # Lightning deals out samples to predict unevenly: ranks that need each other's must have as many batches.
        self._is_joint = self.config.prescaled_batch or trainer.state.fn == states.TrainerFn.PREDICTING
        self._data_stream = DataRngSync(self._engine.mesh, is_joint=self._is_joint)
        self._resumption = (
            Resumption(self._engine.mesh, self._data_stream, self.root_device, self.tree) if fitting else None
        )
        if fitting:
            # Now that samples can be divided: `estimated_stepping_batches` makes the loaders.
            self.setup_optimizers(trainer)
        mesh = self._engine.mesh
        spreads = mesh.pp * mesh.tp > 1 or mesh.shard_group is not None
        refuse_unsupported(trainer, module, self.optimizers, spreads=spreads)
        self.setup_precision_plugin()
        self._engine.attach(
            module, [unwrap(optimizer) for optimizer in self.optimizers], keep_shared=metrics_of(module)
        )
        if self._engine.mesh.dp == 1:
            # All ranks log the same values: there is nothing to synchronise, whatever Lightning recommends.
            warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        self._engine.known = lambda: self._read
        self._engine.copies = lambda: copies_of(module, trainer.callbacks)
        self._begin_saving(trainer)
        self._install_stand_ins(trainer, module, is_manual=fitting and not module.automatic_optimization)
        signal = StopSignal.of(trainer, self.tree)
        if signal is not None:
            self._stand_ins.enter_context(signal.installed())
            self._stop_signal = None if trainer.state.fn == states.TrainerFn.PREDICTING else signal

    def _install_stand_ins(self, trainer: Any, module: Any, *, is_manual: bool) -> None:
        """Replace what has to know of other ranks in this run, on the instances."""
        updates = MetricUpdates(self.engine, module)
        self._stand_ins.callback(lambda: updates.remove(failed=self._has_failed))
        updates.install()
        hooks = UserHooks(self.engine, module, self.tree)
        self._stand_ins.callback(hooks.remove)
        hooks.install(trainer.callbacks)
        are_seen_in_step = any(has_step_hooks(unwrap(each)) for each in self.optimizers)
        self.engine.gradients_are_seen = is_manual or hooks.see_gradients or are_seen_in_step
        self._forgets_early = not hooks.see_old_gradients
        pairs = zip(map(unwrap, self.optimizers), self._lightning_optimizers, strict=True)
        self._stand_ins.enter_context(switching_together(self.engine, pairs))
        scaler = self.precision_plugin.scaler
        if is_manual:
            self._manual = ManualOptimization(self.engine, module, self.precision_plugin.train_step_context, scaler)
            self._stand_ins.callback(self._manual.remove)
            self._manual.install(
                self.optimizers, self._lightning_optimizers, [config.scheduler for config in self.lr_scheduler_configs]
            )
        elif scaler is not None:
            schedulers = passing_over_skipped(module, scaler, self.optimizers, self.lr_scheduler_configs)
            self._stand_ins.enter_context(schedulers)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model`: with `delayed_parameter_initialization` tensors get shapes only."""
        delayed = self.config.delayed_parameter_initialization
        with super().tensor_init_context(empty_init), torch.device("meta") if delayed else nullcontext():
            yield

    def model_to_device(self) -> None:
        """Move the whole model; the engine moves the parts once it is partitioned, and what has no values yet."""
        assert self.model is not None
        device = self.root_device
        if any(tensor.is_meta for tensor in (*self.model.parameters(), *self.model.buffers())):
            self.tree.fabric("utilities.device_dtype_mixin")._update_properties(self.model, device=device)
            self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        else:
            self.model.to(device)

    def _engine_for(self, module: Any) -> Engine:
        """The engine of the last run, if it fits ``module`` as it is now, or a new one."""
        if self._engine is not None and self._engine.serves(module):
            return self._engine
        tell = self.tree.pytorch("utilities.rank_zero").rank_zero_info
        # A progress bar may stand on the current line.
        return Engine(
            self.config, report=lambda text: tell(f"\n{text}"), device=self.root_device, timeout=self._timeout
        )

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, which scales and clips by what all ranks have found."""
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

    def explain(self) -> Explanation:
        """Why the units are where they are, from the first step on: ``print`` it, or ``save`` it as a page.

        All ranks know it.
        """
        return self.engine.inspection.explain()

    def timeline(self) -> Timeline:
        """When each stage did what in the latest training step, beside its timetable: ``print`` it, or ``save`` it.

        Call it on all ranks of a replica, after a training step: in a callback, say, or after `trainer.fit`. With
        replicas every rank gets to know its own. ``save`` writes on global rank 0 only.

        Raises:
            SMPError: no training step has run after a timetable yet.
        """
        return self.engine.inspection.timeline()

    def memory_report(self) -> MemoryReport:
        """What each rank holds, counted, beside what was predicted: ``print`` it, or ``save`` it.

        Call it on all ranks between steps, in a hook or a callback: after a run the module is whole again.
        """
        return self.engine.inspection.memory_report()

    def save_partition(self, path: str | Path) -> None:
        """Write which unit is on which stage to a file, on global rank 0; `load_partition` reads it.

        Raises:
            SMPError: it is not decided yet.
        """
        if self.engine.partition is None:
            raise SMPError("The partition is decided in the first step, but is asked for before. Ask after it.")
        if self.global_rank == 0:
            self.engine.partition.save(path)

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of all microbatches. See [Note: commit]."""
        module, batch = self.lightning_module, (*args, *kwargs.values())
        assert module is not None
        self._look_after_saves()
        context = self.precision_plugin.train_step_context
        if self._manual is not None:
            self._has_stepped = False
            with self._in_step():
                return steps.run_manual_step(self.engine, module, batch, context=context)
        number, length = steps.accumulation_window(module.trainer)
        if number == 0 and self._forgets_early:
            forget_gradients(map(unwrap, self.optimizers))
        scaler = self.precision_plugin.scaler
        with self._in_step():
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
        """Backward of the loss that a step has returned, or, under manual optimization, of the microbatches' losses."""
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
        if self._stop_signal is not None and self.engine.mesh.dp == 1:  # replicas may have more batches than others
            self._stop_signal.check()
        with self._in_step():
            module, is_joint = self.lightning_module, self._is_joint
            return steps.run_eval_step(self.engine, module, name, args, context=context, is_joint=is_joint)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the optimizer, which may evaluate the loss once; a user's hook of the same name may be around it."""
        in_sight = self.engine.run_hook if self.engine.inspection.divides_updates else None
        if self._manual is not None and self.engine.mesh.pp > 1:  # inside of a step, which is no place for a view
            in_sight = None
        with hooks_around_step(unwrap(optimizer), in_sight), self._in_step(), self.engine.views.put_aside():
            if self._manual is not None:
                self._manual.reduce(optimizer)
            result = super().optimizer_step(optimizer, evaluated_once(closure, optimizer), model, **kwargs)
            self.engine.end_update(unwrap(optimizer))
            self._has_stepped = True
            return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Batches in here do not end the accumulation window: their gradients stay on this replica."""
        self._may_reduce = False
        try:
            yield
        finally:
            self._may_reduce = True

    # Data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are divided among replicas, not among ranks, unless each part of a replica reads its own."""
        mesh = self.engine.mesh
        if self._is_joint:
            return {"num_replicas": mesh.dp, "rank": mesh.dp_rank}
        return {"num_replicas": mesh.dp * mesh.tp, "rank": mesh.dp_rank * mesh.tp + mesh.tp_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make all ranks of a replica draw alike. See [Note: data stream]."""
        if not isinstance(dataloader, torch.utils.data.DataLoader):
            return dataloader
        assert self._data_stream is not None
        twin = following(dataloader, self._data_stream, self.tree, dp_rank=self.distributed_sampler_kwargs["rank"])
        if self._resumption is not None and self._trainer.validating:
            self._resumption.set_evaluation(twin)
        return twin

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the batch with the user's transfer hooks, whose draws belong to the data path."""
        if self._data_stream is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        self._data_stream.check(batch)
        self._read = self._data_stream.read_of(batch)
        with self._data_stream.draws():
            return super().batch_to_device(batch, device, dataloader_idx)

    # The end

    def on_train_end(self) -> None:
        """A signal that came in the last step ends the run as well, before anything is let go of."""
        if self._stop_signal is not None:
            self._stop_signal.end()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one ends, and see to it that they end."""
        self._has_failed = True
        end_as_stopped(exception, self.tree)
        publish_own(exception)
        if self._launcher is not None:
            # Ranks that only wait for this one cannot notice while it lives, and have nothing of their own to say.
            patience = 5.0 if isinstance(exception, PeerFailedError) else 1.0
            self._launcher.end_children(patience)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """End one of fit, validate, test, predict; another may follow. The module becomes an ordinary one again."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._end_saving()
        self._stand_ins.close()
        self._manual = self._stop_signal = None
        if self._engine is not None:
            self._engine.detach(failed=self._has_failed)
            if self._engine.is_spread:
                leave_spread(self.lightning_module, self._engine)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def leave(self) -> None:
        """Let go of the process groups, when the process ends. See [Note: leaving]."""
        if self._engine is None or self._has_failed:
            return
        self._engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # what earlier runs have left may hold groups, too
