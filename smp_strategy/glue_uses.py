"""Weights of units that code above the units computes with.

``logits = hidden @ self.embed.weight.T`` or an L2 term over ``self.parameters()`` uses a weight where its unit may not
live. The dry run notices such uses; the weights concerned are then held by every stage, and their gradients are added
up over the stages, like those of a parameter that stands in the glue itself.
"""

from collections.abc import Sequence
from typing import Any, final

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp_strategy.pipeline.placed import METADATA
from smp_strategy.units import Unit

__all__ = ["GlueUses"]


@final
class GlueUses(TorchFunctionMode):
    """While this is entered, notes every parameter of a unit that an operation takes; questions of metadata do not
    count. Units themselves run on stand-ins of their parameters meanwhile, so what is seen is the glue's.

    Args:
        units: whose parameters are meant.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._parameters = {id(parameter) for unit in units for parameter in unit.module.parameters()}
        self.found: dict[int, nn.Parameter] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._parameters:
                    self.found[id(leaf)] = leaf
        return func(*args, **kwargs)
