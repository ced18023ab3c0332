"""Metric objects as a loss, or a part of one: a value that gradients flow through.

Under a pipeline metrics are updated with real values, whose history ends where they are read
(:mod:`smp_strategy.integrations.lightning.metrics`). If a metric is called with results of the model that require a
gradient, its value may be trained on. So the value is computed once more as code of the step, by a copy of the metric
with states of its own: these become placed tensors, and the metric's own states stay as they are.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["may_be_trained", "trained_value"]


def may_be_trained(metric: Metric, args: Any, kwargs: Any) -> bool:
    """Whether the value of ``metric`` for these arguments may be a part of a loss."""
    if metric.is_differentiable is False or not torch.is_grad_enabled():
        return False
    if type(metric).forward is not Metric.forward or any(isinstance(each, Metric) for each in metric.children()):
        return False
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, PlacedTensor) and leaf.requires_grad for leaf in leaves)


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
