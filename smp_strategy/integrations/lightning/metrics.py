"""Torchmetrics objects under a pipeline: every rank of a replica updates them with real values, counted once.

A metric accumulates state on the module and is updated in steps, with tensors that most pipeline ranks know by shape
only. During a run, ``forward`` and ``update`` of each metric therefore get real values, the same on every rank of a
replica. The states stay equal there, and ``compute`` reduces them over the replicas only. The values travel to all
stages: a metric of the logits costs as many bytes as the logits have.

``forward`` returns the value of the microbatch, which may be trained on
(:mod:`smp_strategy.integrations.lightning.metrics`); ``self.log`` shows that of the whole batch
(:mod:`smp_strategy.integrations.lightning.metric_values`).

A metric inside a unit is updated on the unit's stage. Outside of steps, ``compute`` first broadcasts its state to all
stages; for values logged in a step, the value is broadcast.

After a run, a metric is ordinary again, with its state on all ranks. ``compute`` still reduces over the replicas, until
the next run.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.figures.inspection import is_placed
from smp_strategy.integrations.lightning.metric_values import is_settling, noted_forward, see_state
from smp_strategy.model.patching import Patches

__all__ = ["may_be_trained", "trained_value", "MetricUpdates", "metrics_of", "share_value"]

_SHARING: Final = "what a metric has on one stage"


# --- trained metrics -------------------------------------------------------------------------------------------------
# Metric objects as a loss, or a part of one: a value that gradients flow through.
#
# Under a pipeline metrics are updated with real values, whose history ends where they are read
# (`smp_strategy.integrations.lightning.metrics`). If a metric is called with results of the model that require a
# gradient, its value may be trained on. So the value is computed once more as code of the step, by a copy of the metric
# with states of its own: these become placed tensors, and the metric's own states stay as they are.


def may_be_trained(metric: Metric, args: Any, kwargs: Any) -> bool:
    """Whether the value of ``metric`` for these arguments may be a part of a loss."""
    if metric.is_differentiable is False or not torch.is_grad_enabled():
        return False
    if type(metric).forward is not Metric.forward or any(isinstance(each, Metric) for each in metric.children()):
        return False
    leaves = pytree.tree_leaves((args, kwargs))
    return any(is_placed(leaf) and leaf.requires_grad for leaf in leaves)


def trained_value(metric: Metric, args: Any, kwargs: Any) -> Any:
    """Value of ``metric`` for these arguments alone, with their gradients; its states stay as they are."""
    twin = copy.copy(metric)  # which has methods of its class again
    vars(twin).pop("forward", None)
    for name, default in metric._defaults.items():
        setattr(twin, name, default.detach().clone().to(metric.device) if isinstance(default, Tensor) else [])
    twin._update_count, twin._computed, twin._cache, twin._is_synced = 0, None, None, False
    twin._enable_grad, twin._to_sync, twin._should_unsync = True, False, False
    twin.update(*args, **kwargs)
    return twin.compute()


# --- metrics of the user ---------------------------------------------------------------------------------------------


class MetricUpdates:
    """Patches of the metrics of a module: they get real values, and reduce over the replicas."""

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        self._engine = engine
        self._metrics = metrics_of(module)
        self._patches = Patches()  # bypasses Metric.__setattr__, which reserves some names

    def install(self) -> None:
        """Patch the metrics, on the instances."""
        for metric in self._metrics:
            if isinstance(metric.dist_sync_fn, _FromReplicas):
                metric.dist_sync_fn = None
            self._patches.put(metric, "forward", self._with_forward(metric))
            self._patches.put(metric, "update", self._with_values(metric.update, lambda: None))
            self._patches.put(metric, "compute", self._with_sums(metric))
            if metric.process_group is None:
                self._patches.put(metric, "process_group", self._engine.mesh.dp_group)

    def lifted(self) -> AbstractContextManager[None]:
        """Context in which the metrics are as without patches."""
        return self._patches.lifted()

    def remove(self, *, failed: bool) -> None:
        """Restore the methods, and share the states of metrics inside units. Collective, unless the run ``failed``."""
        mesh = self._engine.mesh
        for metric in self._metrics:
            stage = self._engine.inspection.stage_of(metric)
            if stage is not None and not failed:
                _share_sums(metric, stage, self._engine)
            if metric.process_group is mesh.dp_group and metric.dist_sync_fn is None:
                metric.dist_sync_fn = _FromReplicas(mesh.dp_group)
        self._patches.give_back()

    def _with_forward(self, metric: Metric) -> Callable[..., Any]:
        forward = functools.wraps(metric.forward)(noted_forward(metric, metric.forward))
        with_values = self._with_values(forward, _unknown)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            value = with_values(*args, **kwargs)
            return trained_value(metric, args, kwargs) if may_be_trained(metric, args, kwargs) else value

        return run

    def _with_values(self, method: Callable[..., Any], unknown: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._engine.call_with_values(method, args, kwargs, unknown=unknown)

        return run

    def _with_sums(self, metric: Metric) -> Callable[[], Any]:
        compute = metric.compute

        @functools.wraps(compute)
        def run() -> Any:
            see_state(metric)
            stage = (
                None
                if self._engine.inspection.is_in_step or is_settling()
                else self._engine.inspection.stage_of(metric)
            )
            if stage is not None:
                _share_sums(metric, stage, self._engine)
            return compute()

        return run


@final
class _FromReplicas:
    """Gathers a tensor from the replicas, for metrics of an ended run. It is pickled as ``None``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)

    def __call__(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        found: list[Tensor] = gather_all_tensors(tensor, self._group() if group is None else group)
        return found

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(None), ()


def _share_sums(metric: Metric, stage: int, engine: Engine) -> None:
    """Broadcast the state of ``metric`` from ``stage`` to all stages. Collective over the stages."""
    mesh = engine.mesh
    told: Any = None
    if mesh.stage == stage:
        sums = pytree.tree_map_only(Tensor, Tensor.cpu, {name: getattr(metric, name) for name in metric._defaults})
        told = (sums, metric._update_count)
    told = mesh.told_by_stage(told, stage, _SHARING)
    if mesh.stage != stage:
        sums, metric._update_count = told
        for name, value in sums.items():
            setattr(metric, name, pytree.tree_map_only(Tensor, lambda tensor: tensor.to(metric.device), value))
        metric._computed = None


def share_value(engine: Engine, metric: Metric, value: Any) -> Any:
    """The ``value`` of ``metric`` on the stage that runs it; if there is a single such stage, collective."""
    stage, mesh = engine.inspection.stage_of(metric), engine.mesh
    if stage is None or mesh.pp == 1:
        return value
    told = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value) if mesh.stage == stage else None
    told = mesh.told_by_stage(told, stage, _SHARING)
    if mesh.stage == stage:
        return value
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(metric.device), told)


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metric objects among the submodules of ``module``."""
    return [metric for metric in module.modules() if isinstance(metric, Metric)]


def _unknown() -> Tensor:
    """The result of a metric in the dry run, where nothing has a value."""
    return torch.zeros(())
