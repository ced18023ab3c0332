"""A layer that is the same on all ranks, but gets parts: the norm of each head's queries, say.

Each rank sees what its own heads do to the parameters. Their gradients must be added up, or ranks would go apart.
"""

from typing import Any, Self

from torch import nn

from smp_strategy.tensor_parallel.autograd_collectives import copy
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.layers.base import CannotSplit, SplitLayer

__all__ = ["AmongParts"]


class AmongParts(SplitLayer):
    """A layer whose parameters have their gradients added up over the ranks."""

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup) -> Self:
        """Change ``layer`` in place.

        Raises:
            CannotSplit: its parameters are those of layers in it.
        """
        if any(layer.children()):
            raise CannotSplit("it is made of other layers")
        return cls._split(layer, group, {}, {}, {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the dense layer computes."""
        own = self._parameters
        # Its code asks for `self.weight`.
        vars(self)["_parameters"] = {
            name: None if parameter is None else copy(parameter, self.group) for name, parameter in own.items()
        }
        try:
            return type(self)._dense.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            vars(self)["_parameters"] = own
