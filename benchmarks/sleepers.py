"""A model whose units sleep: any number of ranks can be timed on few cores, and it is known how long passes take."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import Batch, Chain

from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.schedule.flow import Flow, route

__all__ = ["Sleepers"]


class SleepingInput(torch.autograd.Function):
    """Sleeps on the way of the input and on that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SleepingWeight(torch.autograd.Function):
    """Sleeps on the way of the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


# Forward, gradient of the input and of the weight take 24 h + 4 s, 24 h + 8 s and 24 h operations per token and unit
# of width, in a transformer's block of width h on s tokens (arXiv:2401.10241, table 1): here h = s = 4096, and 1 is the
# mean. If they were equal, the published timetables, which are drawn for that, could not be improved.
PASSES = Work(forward=1.0, input_gradient=8 / 7, weight_gradient=6 / 7)


class Sleeper(nn.Module):
    """A unit whose passes take ``seconds`` on average, and no core."""

    WIDTH = 16

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.work = PASSES.scaled(seconds)
        self.weight = nn.Parameter(torch.eye(self.WIDTH) + 0.1 * torch.randn(self.WIDTH, self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = SleepingInput.apply(x, self.work.forward, self.work.input_gradient)
        return F.linear(x, SleepingWeight.apply(self.weight, self.work.weight_gradient))


class Sleepers(NamedTuple):
    """What sleeps."""

    seconds: tuple[float, ...]
    """Of the passes of each unit, on average."""

    def model(self) -> Chain:
        return Chain([Sleeper(seconds) for seconds in self.seconds])

    def batch(self, num_microbatches: int) -> Batch:
        return torch.randn(num_microbatches, Sleeper.WIDTH), torch.randn(num_microbatches, Sleeper.WIDTH)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def flow(self, stage_of: Mapping[str, int], num_stages: int) -> Flow:
        """Its segments with the seconds that they take: nobody waits for the gradient of the batch."""
        values = [Value(number, 4 * Sleeper.WIDTH, True) for number in range(len(self.seconds))]
        inputs = [(), *((value,) for value in values)]
        events = [Event("unit", f"parts.{number}", inputs[number], (value,)) for number, value in enumerate(values)]
        work = {number: PASSES.scaled(seconds) for number, seconds in enumerate(self.seconds)}
        work[0] = work[0]._replace(input_gradient=0.0)
        return route(Trace(events, values[-1].id), stage_of, num_stages, work)
