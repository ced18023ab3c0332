"""The callback ``SMPMonitor``: figures of a run go to Lightning's loggers and the progress bar.

The engine counts (:mod:`smp_strategy.engine.figures.step_monitor`); the callback asks for the figures when Lightning
logs, that is every ``log_every_n_steps`` updates. Updates with gradients that are not finite are left out in the way in
which a loss scaler leaves out updates that have overflowed: by a scaler whose scale is always 1.
"""

import functools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smp_strategy.engine.figures.nonfinite import NonfinitePolicy
from smp_strategy.engine.figures.step_monitor import StepMonitor
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.integrations.lightning.checkpoint_hooks import unwrap
from smp_strategy.integrations.lightning.precision_plugin import methods_with
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.model.patching import subclass_of
from smp_strategy.reports.run_figures import IN_PROGRESS_BAR

__all__ = ["MonitorHooks", "make_monitor", "monitored"]


class MonitorHooks:
    """Log speed, memory and waiting of a run, and find NaN and infinity.

    Example::

        trainer = Trainer(strategy="smp_pp2", devices=2, callbacks=[SMPMonitor(nonfinite="skip")])

    Args:
        nonfinite: when gradients are NaN or infinite: ``raise`` an error that names unit, stage and microbatch,
            ``skip`` the update with a warning, or ``ignore`` it, which costs nothing.
        trace_steps: numbers of training steps, from 1, whose timeline is saved.
        trace_folder: folder for ``step-<number>.json``, for https://ui.perfetto.dev; default: the Trainer's root.
    """

    tree: Tree

    def __init__(
        self,
        nonfinite: NonfinitePolicy = "raise",
        trace_steps: Collection[int] = (),
        trace_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.monitor = StepMonitor(nonfinite, trace_steps, tell=self._warn)
        self.trace_folder = trace_folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn if there is nothing to measure."""
        if not hasattr(trainer.strategy, "timeline"):
            self._warn("SMPMonitor measures runs of the strategy `smp` only; this run has another strategy.")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log figures if this batch ends an update after which Lightning logs. Collective then."""
        strategy = trainer.strategy
        if not hasattr(strategy, "timeline"):
            return
        if trainer.fit_loop._should_accumulate() or not trainer._logger_connector.should_update_logs:
            return
        scaler = strategy.precision_plugin.scaler
        is_guard = scaler is None or scaler.rules.is_static
        found = strategy.engine.inspection.figures(None if is_guard else scaler.get_scale())
        for is_shown in (True, False):
            shown = {name: value for name, value in found.items() if (name in IN_PROGRESS_BAR) is is_shown}
            pl_module.log_dict(shown, prog_bar=is_shown, batch_size=1)

    def _warn(self, text: str) -> None:
        self.tree.pytorch("utilities.rank_zero").rank_zero_warn(text)


@functools.cache
def make_monitor(root: str) -> type[MonitorHooks]:
    """The class ``SMPMonitor`` for the Lightning tree ``root``."""
    tree = Tree(root)
    made: type[MonitorHooks] = tree.subclass("SMPMonitor", MonitorHooks, tree.pytorch("callbacks.callback").Callback)
    return made


@contextmanager
def monitored(strategy: Any, callbacks: Iterable[Any], *, is_guarded: bool) -> Iterator[None]:
    """Let the monitor among ``callbacks``, if there is one, hear of the steps of a run, whose engine exists.

    If it ``is_guarded``, updates can be left out: Lightning makes them, and not the user's step.
    """
    callback = next((each for each in callbacks if isinstance(each, MonitorHooks)), None)
    monitor = None if callback is None else callback.monitor
    if callback is not None:
        root = strategy.lightning_module.trainer.default_root_dir
        callback.monitor.trace_folder = Path(callback.trace_folder or root)
    inspection, plugin = strategy.engine.inspection, strategy.precision_plugin
    inspection.monitor = monitor
    plain = type(plugin)
    guards = monitor is not None and monitor.searches and is_guarded and plugin.scaler is None
    if guards:
        scaler = GradScaler(
            ScalingRules.static(1.0),
            lambda *given: strategy.engine.unscale(*given),
            lambda: map(unwrap, strategy.optimizers),
            warns=False,
        )
        step = methods_with(scaler, plain.stock_plugin, strategy.tree)["optimizer_step"]
        plugin.__class__ = subclass_of(plain, optimizer_step=step)
        plugin.scaler = scaler
    try:
        yield
    finally:
        inspection.monitor = None
        if guards:
            plugin.__class__, plugin.scaler = plain, None
