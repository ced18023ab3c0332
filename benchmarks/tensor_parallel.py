"""Layers split over ranks, beside PyTorch's ``parallelize_module``, in one run::

    python benchmarks/tensor_parallel.py            # 2 and 4 ranks
    python benchmarks/tensor_parallel.py --quick    # small, two rounds: does it run?

A step is forward, backward and AdamW of a few blocks of the kinds of Llama (rotary embedding, grouped-query attention,
gated MLP) and of GPT-2 (fused queries, keys and values, layer norms, biases). The blocks are plain PyTorch. Both sides
have the same weights and batches, run in the same processes over gloo, and take turns, each going first every other
time; what counts is the median of the ratios of neighbours. Before anything is timed, results and gradients are
compared.

* Memory: live bytes of tensors at most in forward and backward (benchmarks/live_bytes.py), on the fullest rank, less
  those of weights. Gradients of weights are among them, on both sides.
* Bytes: what a rank puts into collectives. The least is one whole activation in forward and one in backward for each
  region (attention, MLP). Theirs are counted as calls, all of that size.

The last line is JSON: ``worst_time_vs_dtensor`` and ``memory_vs_dtensor`` (ours over theirs, in the worst case), and
``bytes_over_minimum`` (ours, in the worst case).
"""

import copy
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from live_bytes import peak_of
from tensor_parallel_blocks import GPT2Block, LlamaBlock
from timing import over_ranks, seconds_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from workloads import Chain

from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from smp_strategy.testing import run_ranks

WARM_UPS, NUM_BLOCKS, REGIONS_OF_A_BLOCK = 3, 4, 2
KINDS: dict[str, Callable[[int], nn.Module]] = {"llama": LlamaBlock, "gpt2": GPT2Block}


class Size(NamedTuple):
    """How long it takes."""

    width: int
    samples: int
    length: int
    rounds: int
    steps: int
    """Of a turn."""


USUAL = Size(512, 4, 256, 9, 2)
QUICK = Size(256, 2, 32, 2, 1)


class Side:
    """One of the two."""

    name: str

    def __init__(self, model: Chain, batch: Tensor) -> None:
        self.model, self._batch = model, batch
        self.split()
        self.optimizer = AdamW(model.parameters(), 1e-4)

    def split(self) -> None:
        """Make each rank hold a part of the model."""
        raise NotImplementedError

    def forward_backward(self) -> Tensor:
        """The result of the model."""
        y = self.model(self._batch)
        y.square().mean().backward()
        return y.detach()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward_backward()
        self.optimizer.step()

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and gradients."""
        raise NotImplementedError

    def activation_bytes(self) -> float:
        """At most, on the fullest rank. The least of some runs: threads of collectives free memory sooner or later."""
        weights = sum(weight.nbytes for weight, _ in self.parts())
        peaks = []
        for _ in range(3):
            self.optimizer.zero_grad()
            peaks.append(peak_of(self.forward_backward, iter(())))
        return over_ranks(min(peaks) - weights, dist.ReduceOp.MAX)

    def sent_bytes(self) -> int:
        """Of a rank in forward and backward."""
        raise NotImplementedError


class Ours(Side):
    """Layers of this package."""

    name = "ours"

    def split(self) -> None:
        self.group = TensorGroup(dist.group.WORLD)
        for block in self.model.parts:
            for name, settings in block.columns().items():
                ColumnParallelLinear.from_dense(block.get_submodule(name), self.group, **settings)
            for name in block.rows():
                RowParallelLinear.from_dense(block.get_submodule(name), self.group)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return [(weight.detach(), weight.grad) for weight in self.model.parameters()]

    def sent_bytes(self) -> int:
        before = self.group.sent_bytes
        self.forward_backward()
        return self.group.sent_bytes - before


class Theirs(Side):
    """DTensors."""

    name = "DTensor"

    def split(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.parts:
            plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in block.columns()}
            parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in block.rows()})

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return [(local(weight.detach()), local(weight.grad)) for weight in self.model.parameters()]

    def sent_bytes(self) -> int:
        calls = CommDebugMode()
        with calls:
            self.forward_backward()
        return calls.get_total_counts() * self._batch.nbytes


class Row(NamedTuple):
    """What was found of one kind of block."""

    kind: str
    ranks: int
    milliseconds: tuple[float, float]
    ratio: float
    peaks: tuple[float, float]
    sent: tuple[int, int]
    least: int


def measure(kind: str, size: Size) -> Row:
    """Compare both sides; on every rank."""
    torch.manual_seed(0)
    model = Chain([KINDS[kind](size.width) for _ in range(NUM_BLOCKS)])
    batch = torch.randn(size.samples, size.length, size.width, requires_grad=True)
    sides = [side(copy.deepcopy(model), batch) for side in (Ours, Theirs)]
    check(*sides)
    peaks = tuple(side.activation_bytes() for side in sides)
    sent = tuple(side.sent_bytes() for side in sides)
    for side in sides:
        for _ in range(WARM_UPS):
            side.step()
    turns: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(size.rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            turns[side.name].append(seconds_of(lambda side=side: [side.step() for _ in range(size.steps)]) / size.steps)
    ours, theirs = turns.values()
    ratio = median(one / other for one, other in zip(ours, theirs, strict=True))
    times = (median(ours) * 1e3, median(theirs) * 1e3)
    least = NUM_BLOCKS * REGIONS_OF_A_BLOCK * 2 * batch.nbytes
    return Row(kind, dist.get_world_size(), times, ratio, peaks, sent, least)


def check(ours: Side, theirs: Side) -> None:
    """A benchmark of wrong numbers is worth nothing."""
    results = [side.forward_backward() for side in (ours, theirs)]
    pairs = [tuple(results), *((one, other) for (_, one), (_, other) in zip(ours.parts(), theirs.parts(), strict=True))]
    for number, (one, other) in enumerate(pairs):
        error = (one - other).abs().max() / other.abs().max()
        if one.shape != other.shape or error > 1e-4:
            raise AssertionError(f"Tensor {number} differs by {float(error):.2g}.")


def local(tensor: Tensor) -> Tensor:
    """Of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def show(row: Row) -> None:
    """As a line of the table."""
    times, peaks, sent = row.milliseconds, row.peaks, row.sent
    print(
        f"{row.kind:8} {row.ranks:5} {times[0]:8.1f} {times[1]:8.1f} {row.ratio:6.2f} "
        f"{peaks[0] / 1e6:8.1f} {peaks[1] / 1e6:8.1f} {sent[0] / 1e6:8.1f} {sent[1] / 1e6:8.1f} {row.least / 1e6:8.1f}",
        flush=True,
    )


def main(arguments: Sequence[str]) -> None:
    """All kinds on all numbers of ranks."""
    size = QUICK if "--quick" in arguments else USUAL
    torch.set_num_threads(1)
    columns = ("ms", "DTensor", "ratio", "peak MB", "DTensor", "sent MB", "DTensor", "least")
    print(
        f"{'block':8} {'ranks':>5} {columns[0]:>8} {columns[1]:>8} {columns[2]:>6}", *(f"{c:>8}" for c in columns[3:])
    )
    rows = []
    for ranks in (2, 4):
        for kind in KINDS:
            rows.append(run_ranks(measure, ranks, kind, size, timeout=600)[0])
            show(rows[-1])
    figures = {
        "worst_time_vs_dtensor": max(row.ratio for row in rows),
        "memory_vs_dtensor": max(row.peaks[0] / row.peaks[1] for row in rows),
        "bytes_over_minimum": max(row.sent[0] / row.least for row in rows),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
