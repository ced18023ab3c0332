"""A small model, its batches, a fresh Accelerator in a forked rank, and the plain loop in one process to compare with.

The reference knows nothing of Accelerate: one process, one microbatch after the other, gradients added up.
"""

import os
import warnings
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, Dataset

from smp_strategy import SMPPlugin
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

FEATURES, WIDTH, CLASSES, BATCH, STEPS = 8, 16, 4, 8, 6
MICROBATCHES = 4


@dataclass
class Result:
    """What a model returns that is no tensor, tuple or mapping."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class Toy(nn.Module):
    """Blocks with a loss inside, if it is given targets, and results of each kind that models have."""

    def __init__(self, kind: str = "dict", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.inlet = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        )
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs, targets=None):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.outlet(hidden)
        loss = None if targets is None else nn.functional.cross_entropy(logits, targets)
        if self.kind == "tensor":
            return logits if loss is None else loss
        if self.kind == "tuple":
            return (logits,) if loss is None else (loss, logits)
        if self.kind == "dataclass":
            return Result(loss, logits)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class Samples(Dataset):
    """Dicts of tensors, one for each sample."""

    def __init__(self, count: int = STEPS * BATCH) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.targets = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def toy(kind: str = "dict", **options) -> Toy:
    torch.manual_seed(0)
    return Toy(kind, **options)


def batches(count: int = STEPS, batch_size: int = BATCH) -> list[dict[str, torch.Tensor]]:
    """In the order of the samples."""
    return list(DataLoader(Samples(count * batch_size), batch_size=batch_size))


def adamw(model):
    # Not a tiny eps: Adam would blow the rounding of another order of additions up where gradients are tiny.
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def fresh_accelerator(smp: dict | None = None, **options) -> Accelerator:
    """An Accelerator as in a new process; plain in one process if ``smp`` is ``None``."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]
    if smp is None:
        os.environ.pop("LOCAL_RANK", None)
        return Accelerator(cpu=True, **options)
    return Accelerator(cpu=True, parallelism_config=SMPPlugin(**smp), **options)


def on_ranks(body, world_size: int, *args, timeout: float = 150.0):
    """``run_ranks`` with the warnings of other libraries ignored."""
    return run_ranks(_quietly, world_size, body, args, timeout=timeout)


def _quietly(body, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return body(*args)


def mine(accelerator, batch):
    """This replica's share of a batch, as a sampler would deal samples out."""
    size = len(batch["inputs"]) // accelerator.smp.num_data_ranks
    start = size * accelerator.smp.data_rank
    return {name: value[start : start + size] for name, value in batch.items()}


def loss_inside(model, batch):
    """Of a model that computes its loss."""
    result = model(**batch)
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple):
        return result[0]
    return result["loss"] if isinstance(result, dict) else result.loss


def loss_outside(model, batch):
    """Of the model's logits."""
    result = model(batch["inputs"])
    if isinstance(result, tuple):
        result = result[0]
    logits = result["logits"] if isinstance(result, dict) else getattr(result, "logits", result)
    return nn.functional.cross_entropy(logits, batch["targets"])


def plain_loop(
    model, optimizer, data, *, loss_of=loss_inside, microbatches=MICROBATCHES, window=1, clip=None, schedule=None
):
    """Train in one process, microbatch by microbatch; the last window may be shorter. Losses of the batches."""
    losses = []
    for number, batch in enumerate(data):
        parts, sizes = split(batch, microbatches)
        found = []
        for part, size in zip(parts, sizes, strict=True):
            loss = loss_of(model, part)
            (loss * (size / sum(sizes) / window)).backward()
            found.append(loss.detach() * (size / sum(sizes)))
        losses.append(torch.stack(found).sum())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if (number + 1) % window == 0 or number + 1 == len(data):
            optimizer.step()
            if schedule is not None:
                schedule()
            optimizer.zero_grad()
    return losses


def accelerated_loop(accelerator, model, optimizer, data, *, loss_of=loss_inside, clip=None, scheduler=None):
    """The loop of the issue, over batches that this replica takes its share of."""
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = loss_of(model, mine(accelerator, batch))
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole_state(accelerator):
    """The weights as one process has them, on rank 0."""
    return {name: value.clone() for name, value in accelerator.smp.engine.saved.full_state_dict().items()}


def assert_same(found, expected, *, rtol=0.0, atol=0.0):
    """Two state dicts agree; to the bit unless a tolerance is given."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if rtol or atol:
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)
        else:
            assert torch.equal(found[name], value), name
