"""Whole tensors that parts are computed with: the gradients of several of them travel together.

Where tokens are split, a norm's weight meets the tokens of this rank only, so its gradient is a summand. The weights of
a layer are small, and one message for each would cost more than what is in it.
"""

from collections.abc import Iterable
from typing import final

from torch import Tensor

from smp_strategy.tensor_parallel import autograd_collectives as functions
from smp_strategy.tensor_parallel.group import TensorGroup

__all__ = ["Copies"]


@final
class Copies:
    """Whole tensors, for each rank to use with its tokens: their gradients are added up, all in one message.

    Args:
        tensors: which.
        group: the ranks.
    """

    def __init__(self, tensors: Iterable[Tensor], group: TensorGroup) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._group = group
        self._copies: dict[int, Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The copy of ``tensor``, if it is one of them."""
        if id(tensor) not in self._tensors:
            return None
        if self._copies is None:
            # Not before the first of them is used: a shard may have to be gathered.
            wanted = {number: tensor for number, tensor in self._tensors.items() if tensor.requires_grad}
            copies = functions.copy_together(list(wanted.values()), self._group)
            self._copies = dict(zip(wanted, copies, strict=True))
        return self._copies.get(id(tensor))
