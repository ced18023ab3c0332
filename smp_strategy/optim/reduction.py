"""When gradients are summed over ranks, and that nothing is counted twice.

Gradients of parameters that several stages hold are added up over the stages, and all gradients are averaged over
the replicas, once between the last backward and whatever looks at them: clipping, hooks, the optimizer. A step that
accumulates by hand may do all this for some parameters and go on adding to the same gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch.distributed as dist
from torch import nn

from smp_strategy.optim.gradients import average_gradients, sum_gradients

__all__ = ["Reduction"]


@final
class Reduction:
    """The sums over ranks that gradients still need.

    Args:
        local: the parameters that this rank holds.
        shared: those among them that several stages hold, with the group of these stages.
        counts_here: whether this rank is the first that holds a parameter.
        replicas: group of the replicas.
    """

    def __init__(
        self,
        local: Sequence[nn.Parameter],
        shared: Sequence[tuple[dist.ProcessGroup, Sequence[nn.Parameter]]],
        counts_here: Callable[[nn.Parameter], bool],
        replicas: dist.ProcessGroup,
    ) -> None:
        self._local = local
        self._shared = shared
        self._counts_here = counts_here
        self._replicas = replicas
        self._pending: set[nn.Parameter] = set()

    def begin_backward(self) -> None:
        """More gradients will be added, on every rank."""
        for _, parameters in self._shared:
            for parameter in parameters:
                if parameter not in self._pending and not self._counts_here(parameter):
                    # What is there is a sum over the stages already, and equal on all of them: one goes on with it.
                    parameter.grad = None
        self._pending.update(self._local)

    def reduce(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Sum up the gradients of ``parameters`` (default: of all) to which something was added. Collective."""
        wanted = self._pending if parameters is None else self._pending.intersection(parameters)
        for group, members in self._shared:
            sum_gradients([parameter for parameter in members if parameter in wanted], group)
        average_gradients([parameter for parameter in self._local if parameter in wanted], self._replicas)
        self._pending = self._pending - wanted
