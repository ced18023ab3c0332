"""Steps that meet other ranks, as people write them for data-parallel training, and such a training to compare with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_gather as imported_by_name

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

WIDTH, SAMPLES, STEPS = 8, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Centred(Block):
    """Takes away the mean over all replicas, inside of the unit."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - 0.5 * dist_nn.all_reduce(x.mean(0)) / dist.get_world_size()


class SyncNorm(torch.autograd.Function):
    """Meets as torch's SyncBatchNorm, which wants a GPU, does: forward and backward, in a group given by name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, dist.get_world_size(group)
        combined = torch.stack([x.mean(0), x.pow(2).mean(0)])
        of_all = [torch.empty_like(combined) for _ in range(size)]
        dist.all_gather(of_all, combined, group, async_op=False)
        mean, square = torch.stack(of_all).mean(0)
        inverse = (square - mean.pow(2) + 1e-5).rsqrt()
        normed = (x - mean) * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        normed, inverse = ctx.saved_tensors
        combined = torch.cat([grad.mean(0), (grad * normed).mean(0)])
        dist.all_reduce(combined, dist.ReduceOp.SUM, ctx.group, async_op=False)
        mean, product = (combined / dist.get_world_size(ctx.group)).chunk(2)
        return (grad - mean - normed * product) * inverse, None


class Synchronized(Block):
    def forward(self, x: Tensor) -> Tensor:
        return SyncNorm.apply(super().forward(x), dist.group.WORLD)


class Net(nn.Module):
    def __init__(self, step: Callable[[Any, Tensor], Tensor], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.step = step
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return self.step(self, batch)


def contrast(mine: Tensor, others: Tensor) -> Tensor:
    labels = torch.arange(len(mine)) + dist.get_rank() * len(mine)
    return F.cross_entropy(mine @ others.t(), labels)


def places_like(tensor: Tensor) -> list[Tensor]:
    return [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]


class GatherLayer(torch.autograd.Function):
    """As in SimCLR."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        output = places_like(x)
        imported_by_name(output, x)
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gradients = torch.stack(grads)
        dist.all_reduce(gradients)
        return gradients[dist.get_rank()]


class ToNeighbour(torch.autograd.Function):
    """As in SigLIP: each rank sends to the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _passed_on(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _passed_on(grad, -1)


def _passed_on(x: Tensor, to: int) -> Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return x.clone()
    received = torch.zeros_like(x)
    sends = dist.P2POp(dist.isend, x.contiguous(), (rank + to) % size)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, (rank - to) % size)]):
        work.wait()
    return received


def gathered_with_gradients(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    return contrast(z, torch.cat(dist_nn.all_gather(z)))


def autograd_function(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    return contrast(z, torch.cat(GatherLayer.apply(z)))


def neighbours(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    return (z @ ToNeighbour.apply(z).t()).tanh().mean()


def own_put_back(net: Net, x: Tensor) -> Tensor:
    """As in CLIP: the others' without gradients."""
    z = net(x)
    output = places_like(z)
    imported_by_name(output, z)
    output[dist.get_rank()] = z
    return contrast(z, torch.cat(output))


def into_plain_tensors(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    output = [torch.zeros(z.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(output, z.detach(), group=dist.group.WORLD)
    return contrast(z, torch.cat(output))


def into_one_tensor(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    output = z.new_empty(dist.get_world_size() * len(z), WIDTH)
    work = dist.all_gather_into_tensor(output, z.detach(), async_op=True)
    work.wait()
    return contrast(z, output)


def on_several_stages(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    early = b(a(x))
    of_all = torch.cat(dist_nn.all_gather(early))
    late = d(c(early))
    return contrast(late, of_all) + contrast(early, torch.cat(dist_nn.all_gather(late)))


def means(net: Net, x: Tensor) -> Tensor:
    """In place, of a tensor that is on one stage and of one that all stages have."""
    z = net(x)
    centre, largest = z.detach().mean(0), x.amax(0)
    dist.all_reduce(centre, async_op=True).wait()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    most = z.detach().amax(0)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    spread = dist_nn.all_reduce(z.var(0)) / dist.get_world_size()
    return (z - centre / dist.get_world_size() - 0.1 * largest * most).pow(2).mean() + spread.mean()


def objects(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"samples": len(x), "rank": dist.get_rank()})
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, z.detach().sum())
    first = [x[0, 0].item()]
    dist.broadcast_object_list(first, src=0)
    dist.barrier()
    return z.pow(2).mean() * sum(each["rank"] + 1 for each in told) + sum(sums) * z.mean() * first[0]


def from_and_to_one(net: Net, x: Tensor) -> Tensor:
    z = net(x)
    is_first = dist.get_rank() == 0
    output = places_like(z) if is_first else None
    dist.gather(z.detach(), output, dst=0)
    back = torch.zeros_like(z)
    dist.scatter(back, output, src=0)
    centre = z.detach().mean(0)
    dist.broadcast(centre, 0)
    total = z.detach().sum(0)
    dist.reduce(total, 0)
    weight = total if is_first else torch.ones_like(total)
    return (z * back).mean() + (z - centre).pow(2).mean() + (z * weight).mean()


def exchanged(net: Net, x: Tensor) -> Tensor:
    z, size = net(x), dist.get_world_size()
    output = torch.empty_like(z)
    dist.all_to_all_single(output, z.detach())
    pieces = [torch.empty_like(piece) for piece in z.chunk(size)]
    dist.all_to_all(pieces, list(z.detach().chunk(size)))
    part = z.new_empty(len(z) // size, WIDTH)
    dist.reduce_scatter_tensor(part, z.detach())
    shares = dist_nn.reduce_scatter(torch.empty_like(z), [z * (number + 1) for number in range(size)])
    return (z * output).mean() + (torch.cat(pieces) * z).mean() + (z * part.mean(0)).mean() + shares.pow(2).mean()


def functional_ones(net: Net, x: Tensor) -> Tensor:
    z, world = net(x), dist.group.WORLD
    of_all = functional.all_gather_tensor_autograd(z, 0, world)
    centre = functional.all_reduce(z.detach().mean(0), "sum", world)
    return contrast(z, of_all) + (z * centre).mean()


def after_a_look(net: Net, x: Tensor) -> Tensor:
    """The survey of such a step runs for real."""
    z = net(x)
    of_all = torch.cat(dist_nn.all_gather(z))
    return contrast(z, of_all) * (2.0 if of_all.sum() > 1e9 else 1.0)


def inside_of_units(net: Net, x: Tensor) -> Tensor:
    return net(x).pow(2).mean()


def norms_inside_of_units(net: Net, x: Tensor) -> Tensor:
    return (net(x) + 0.1 * x).pow(4).mean()


def path_by_values(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    if x[0, 0] > 0:
        h = c(h) * 1.5
    z = d(c(h))
    return contrast(z, torch.cat(dist_nn.all_gather(z)))


def path_by_number(net: Net, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x))
    net.count += 1
    if net.count > 4:
        h = c(h) * 1.5
    z = d(c(h))
    return contrast(z, torch.cat(dist_nn.all_gather(z)))


@dataclasses.dataclass
class Outcome:
    replica: int
    losses: Tensor
    state: dict[str, Tensor]


def _start(step: Callable[[Any, Tensor], Tensor]) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(step, {inside_of_units: Centred, norms_inside_of_units: Synchronized}.get(step, Block))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def _batches(replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(STEPS)]


def _data_parallel(step: Callable[[Any, Tensor], Tensor], microbatches: int) -> Outcome:
    net, optimizer = _start(step)
    losses = []
    for batch in _batches(dist.get_rank()):
        optimizer.zero_grad()
        cut, sizes = split(batch, microbatches)
        for part, size in zip(cut, sizes, strict=True):
            loss = net.loss(part)
            (loss * (size / SAMPLES)).backward()
            losses.append(loss.detach())
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return Outcome(dist.get_rank(), torch.stack(losses), net.state_dict())


def on_layout(step: Callable[[Any, Tensor], Tensor], microbatches: int, options: dict[str, Any]) -> Outcome:
    net, optimizer = _start(step)
    engine = Engine(SMPConfig(microbatches=microbatches, **options))
    engine.attach(net, [optimizer])
    losses = []
    for batch in _batches(engine.mesh.dp_rank):
        result = engine.train_step(net.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        losses += result.outputs
    engine.detach()
    return Outcome(engine.mesh.dp_rank, torch.stack(losses), net.state_dict())


def check(
    step: Callable[[Any, Tensor], Tensor], world_size: int, replicas: int, microbatches: int, **options: Any
) -> None:
    """The numbers are those of as many plain processes as there are replicas, which go over the same microbatches."""
    wanted = run_ranks(_data_parallel, replicas, step, microbatches)
    for found in run_ranks(on_layout, world_size, step, microbatches, options):
        expected = wanted[found.replica]
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=1e-6)
        for name, value in expected.state.items():
            torch.testing.assert_close(found.state[name], value, rtol=1e-6, atol=1e-6, msg=name)
