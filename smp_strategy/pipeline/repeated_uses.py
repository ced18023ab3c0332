"""Backward in which a weight's gradients are added up in a wider dtype than that of each of them.

Autograd adds a gradient to ``.grad`` in place, and converts it while it does (see
:mod:`smp_strategy.precision.master_weights`). But where a backward reaches a weight on several ways (tied weights, a
layer that is called twice, the steps of a recurrent cell), it adds up what they bring before, in the dtype in which it
comes. Such weights are found in the graph, and for this backward their gradients are cast one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smp_strategy.model.guarded_tensors import in_plain_sight
from smp_strategy.pipeline.split_backward import Roots, explored, node_of
from smp_strategy.precision.master_weights import set_gradient_dtype

__all__ = ["widening_backward"]


def widening_backward(roots: Roots, gradients: Sequence[Tensor], **options: Any) -> None:
    """``torch.autograd.backward`` that casts the gradients of weights that it reaches on several ways."""
    with in_plain_sight():
        repeated = [
            parameter
            for node, above in explored(map(node_of, roots)).items()
            if len(above) > 1 and isinstance(parameter := getattr(node, "variable", None), nn.Parameter)
            # Any dtype: it is added up in a wider one.
            if parameter.grad_dtype is None
        ]
        for parameter in repeated:
            set_gradient_dtype(parameter, torch.promote_types(parameter.dtype, torch.float32))
    try:
        torch.autograd.backward(roots, gradients, **options)
    finally:
        with in_plain_sight():
            for parameter in repeated:
                parameter.grad_dtype = None
