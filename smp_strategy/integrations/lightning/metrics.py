"""Metric objects see every sample, and count it once.

A torchmetrics object keeps running sums on the module and is updated in the steps, with tensors that on most ranks of
a pipeline are known by shape only. So while a run lasts, ``forward`` and ``update`` of each metric get real values, the
same on every rank of a replica; the sums stay equal there, and ``compute`` adds them up over the replicas alone.

The values travel to all stages: a metric of the logits costs as many bytes as the logits have.

``forward`` returns what the metric is in the microbatch; what is logged of it is that of the whole batch
(:mod:`smp_strategy.integrations.lightning.metric_values`).

A metric inside of a unit is updated where the unit runs. Outside of steps, ``compute`` gives all stages its sums first,
and what is logged of a step the value.

When a run has ended, a metric is an ordinary one again that has its sums on all ranks. ``compute`` still adds them up
over the replicas, until the next run.
"""

import functools
from collections.abc import Callable
from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.engine import Engine
from smp_strategy.integrations.lightning.metric_values import is_settling, noted_forward, see_state

__all__ = ["MetricUpdates", "metrics_of", "share_value"]


class MetricUpdates:
    """Stands in for the methods of a module's metrics that take tensors.

    Args:
        engine: knows where the values are.
        module: the LightningModule.
    """

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        self._engine = engine
        self._metrics = metrics_of(module)
        self._before: list[tuple[Metric, str, Any]] = []

    def install(self) -> None:
        """Replace them on the instances."""
        for metric in self._metrics:
            if isinstance(metric.dist_sync_fn, _FromReplicas):
                metric.dist_sync_fn = None
            self._replace(metric, "forward", self._with_forward(metric))
            self._replace(metric, "update", self._with_values(metric.update, lambda: None))
            self._replace(metric, "compute", self._with_sums(metric))
            if metric.process_group is None:
                self._replace(metric, "process_group", self._engine.mesh.dp_group)

    def remove(self, *, failed: bool) -> None:
        """Give the methods back. Collective, unless the run has ``failed``."""
        mesh = self._engine.mesh
        for metric in self._metrics:
            stage = self._engine.inspection.stage_of(metric)
            if stage is not None and not failed:
                _share_sums(metric, stage, mesh)
            if metric.process_group is mesh.dp_group and metric.dist_sync_fn is None:
                metric.dist_sync_fn = _FromReplicas(mesh.dp_group)
        for metric, name, before in reversed(self._before):
            if before is None:
                del metric.__dict__[name]
            else:
                metric.__dict__[name] = before[0]
        self._before.clear()

    def _replace(self, metric: Metric, name: str, value: Any) -> None:
        # Past Metric.__setattr__, which reserves some names.
        own = metric.__dict__
        self._before.append((metric, name, (own[name],) if name in own else None))
        own[name] = value

    def _with_forward(self, metric: Metric) -> Callable[..., Any]:
        forward = functools.wraps(metric.forward)(noted_forward(metric, metric.forward))
        return self._with_values(forward, _unknown)

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
                _share_sums(metric, stage, self._engine.mesh)
            return compute()

        return run


@final
class _FromReplicas:
    """Gathers a tensor from the replicas, for a metric of a run that has ended. A copy of it in a file is ``None``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)

    def __call__(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        found: list[Tensor] = gather_all_tensors(tensor, self._group() if group is None else group)
        return found

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(None), ()


def _share_sums(metric: Metric, stage: int, mesh: ProcessMesh) -> None:
    """Give all stages what ``metric`` has on ``stage``. Collective over the stages."""
    told: Any = None
    if mesh.stage == stage:
        sums = pytree.tree_map_only(Tensor, Tensor.cpu, {name: getattr(metric, name) for name in metric._defaults})
        told = (sums, metric._update_count)
    told = collectives.tell(told, mesh.stage_ranks[stage], "what a metric has on one stage", mesh.pp_group)
    if mesh.stage != stage:
        sums, metric._update_count = told
        for name, value in sums.items():
            setattr(metric, name, pytree.tree_map_only(Tensor, lambda tensor: tensor.to(metric.device), value))
        metric._computed = None


def share_value(engine: Engine, metric: Metric, value: Any) -> Any:
    """The ``value`` that ``metric`` has on the stage that runs it; if only one does, collective over the stages."""
    stage, mesh = engine.inspection.stage_of(metric), engine.mesh
    if stage is None or mesh.pp == 1:
        return value
    told = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value) if mesh.stage == stage else None
    told = collectives.tell(told, mesh.stage_ranks[stage], "what a metric has on one stage", mesh.pp_group)
    if mesh.stage == stage:
        return value
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(metric.device), told)


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metric objects among the submodules of ``module``."""
    return [metric for metric in module.modules() if isinstance(metric, Metric)]


def _unknown() -> Tensor:
    """What a metric returns in the dry run, where nothing has a value."""
    return torch.zeros(())
