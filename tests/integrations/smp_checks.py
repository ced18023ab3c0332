"""A small model and its batches for SageMaker's functions, and the plain loop in one process to compare with."""

import torch
import torch.nn.functional as F
from torch import nn

import smp_strategy.smp as smp
from smp_strategy.testing import run_ranks

FEATURES, WIDTH, CLASSES, BATCH, STEPS, MICROBATCHES = 8, 16, 4, 8, 4, 4

LAYOUTS = {
    "pp2": (2, {"partitions": 2, "microbatches": MICROBATCHES}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_gradient_clipping": 1e9}),
    "tp2": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": "speed"}),
    "replicas2": (2, {"partitions": 1, "ddp": True}),
    "pp2 x replicas2": (4, {"partitions": 2, "microbatches": 2, "ddp": True}),
    "single": (1, {}),
}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
            for _ in range(4)
        )
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.outlet(hidden)


def net(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batches(count: int = STEPS, batch: int = BATCH):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (batch,), generator=generator),
        )
        for _ in range(count)
    ]


def adamw(parameters):
    # Not a tiny eps: Adam would blow the rounding of another order of additions up where gradients are tiny.
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mine(batch):
    """This replica's samples, as a sampler deals them out."""
    return tuple(part[smp.rdp_rank() :: smp.rdp_size()] for part in batch)


def plain(given=None, *, parts=1, replicas=1, steps=STEPS, make=adamw):
    """Losses and weights of a single process that adds up the gradients of microbatches, replica by replica."""
    model = net() if given is None else given
    optimizer = make(model.parameters())
    losses = []
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        total, sums = 0.0, []
        for replica in range(replicas):
            for parameter in model.parameters():
                parameter.grad = None
            mine = zip(inputs[replica::replicas].chunk(parts), targets[replica::replicas].chunk(parts), strict=True)
            for part, target in mine:
                loss = F.cross_entropy(model(part), target)
                (loss / parts).backward()
                total = total + loss.detach() / parts / replicas
            sums.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *sums, strict=True):
            parameter.grad = sum(gradients[1:], gradients[0]) / replicas
        losses.append(total)
        optimizer.step()
    return torch.stack(losses), model.state_dict()


@smp.step
def train_step(model, inputs, targets):
    logits = model(inputs)
    loss = F.cross_entropy(logits, targets)
    model.backward(loss)
    return logits, loss


def begin(parameters, model=None, **options):
    smp.init(parameters)
    model = smp.DistributedModel(net() if model is None else model, **options)
    return model, smp.DistributedOptimizer(adamw(model.parameters()))


def on_ranks(body, world_size, *args, timeout=150.0):
    return run_ranks(body, world_size, *args, timeout=timeout)


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 0, "atol": 0}))
