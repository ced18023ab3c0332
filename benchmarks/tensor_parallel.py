"""Layers split over ranks, beside PyTorch's ``parallelize_module``, in one run::

    python benchmarks/tensor_parallel.py            # 2 and 4 ranks
    python benchmarks/tensor_parallel.py --quick    # 2 ranks, small, two rounds: does it run?

A step is forward, backward and AdamW of a few blocks of the kinds of Llama (rotary embedding, grouped-query attention,
gated MLP) and of GPT-2 (fused queries, keys and values, layer norms, biases). The blocks are plain PyTorch. Both sides
have the same weights and batches, run in the same processes over gloo, and take turns, each going first every other
time; what counts is the median of the ratios of neighbours. Before anything is timed, results and gradients are
compared. Each kind is run twice: with whole activations between regions (attention, MLP), and with some tokens of them
on each rank ("tokens"; ``SequenceParallel`` of both sides).

* Memory: live bytes of tensors at most in forward and backward (benchmarks/live_bytes.py), on the fullest rank, less
  those of weights. Gradients of weights are among them, on both sides.
* Bytes: what a rank sends (benchmarks/wire_bytes.py). The least is that of one sum of a whole activation in forward and
  one in backward for each region. With tokens on all ranks, the same is sent as gathers and reductions; ours gathers
  once more in backward, since it keeps the parts only.

The last line is JSON: ``worst_time_vs_dtensor`` and ``memory_vs_dtensor`` (ours over theirs, in the worst case), and
``bytes_over_minimum`` (ours, in the worst case; ``tokens_bytes_over_minimum`` with tokens on all ranks).
"""

import copy
import itertools
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from live_bytes import peak_of
from tensor_parallel_blocks import BLOCKS, Block, Region
from timing import over_ranks, seconds_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW
from wire_bytes import wire_bytes
from workloads import Chain

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel import sequence_parallel as sequence
from smp_strategy.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from smp_strategy.testing import run_ranks

WARM_UPS, NUM_BLOCKS, REGIONS_OF_A_BLOCK = 3, 4, 2
TOKENS = 1
"""The dim of activations along which they stand."""


class Size(NamedTuple):
    """How long it takes."""

    width: int
    samples: int
    length: int
    rounds: int
    steps: int
    """Of a turn."""
    ranks: tuple[int, ...]


USUAL = Size(512, 4, 256, 9, 2, (2, 4))
QUICK = Size(256, 2, 32, 2, 1, (2,))


class Side:
    """One of the two."""

    name: str

    def __init__(self, model: Chain, batch: Tensor, splits_tokens: bool) -> None:
        self.model, self._batch, self._splits_tokens = model, batch, splits_tokens
        self.split()
        self.optimizer = AdamW(model.parameters(), 1e-4)

    def split(self) -> None:
        """Make each rank hold a part of the model."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        """The whole result."""
        return self.model(self._batch)

    def forward_backward(self) -> Tensor:
        """The result of the model."""
        y = self.forward()
        y.square().mean().backward()
        return y.detach()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward_backward()
        self.optimizer.step()

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and gradients."""
        return [(local(weight.detach()), local(weight.grad)) for weight in self.model.parameters()]

    def activation_bytes(self) -> float:
        """At most, on the fullest rank. The least of some runs: threads of collectives free memory sooner or later."""
        weights = sum(weight.nbytes for weight, _ in self.parts())
        peaks = []
        for _ in range(3):
            self.optimizer.zero_grad()
            peaks.append(peak_of(self.forward_backward, iter(())))
        return over_ranks(min(peaks) - weights, dist.ReduceOp.MAX)

    def sent_bytes(self) -> float:
        """Of a rank in forward and backward."""
        return wire_bytes(self.forward_backward)


class Ours(Side):
    """Layers of this package."""

    name = "ours"

    def split(self) -> None:
        group = TensorGroup(dist.group.WORLD)
        for region in regions(self.model).values():
            for name, settings in region.columns.items():
                ColumnParallelLinear.from_dense(region.get_submodule(name), group, **settings)
            RowParallelLinear.from_dense(region.get_submodule(region.row), group)
        if self._splits_tokens:
            sequence.SequenceParallel(list(self.model.parts), group, dim=TOKENS)


class Theirs(Side):
    """DTensors, as in PyTorch's tutorial."""

    name = "DTensor"

    def split(self) -> None:
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        between = Shard(TOKENS) if self._splits_tokens else Replicate()
        plan: dict[str, ParallelStyle] = {}
        for path, region in regions(self.model).items():
            plan |= {f"{path}.{name}": ColwiseParallel() for name in region.columns}
            plan[f"{path}.{region.row}"] = RowwiseParallel(output_layouts=between)
            if self._splits_tokens:
                plan[path] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
                plan[f"{path}_norm"] = SequenceParallel(sequence_dim=TOKENS)
        parallelize_module(self.model, self._mesh, plan)

    def forward(self) -> Tensor:
        if not self._splits_tokens:
            return super().forward()
        # What stands before and behind the blocks is no matter of theirs, but both sides begin and end with the whole.
        whole = DTensor.from_local(self._batch, self._mesh, [Replicate()], run_check=False)
        y = self.model(whole.redistribute(placements=[Shard(TOKENS)]).to_local())
        return DTensor.from_local(y, self._mesh, [Shard(TOKENS)], run_check=False).full_tensor()


def regions(model: Chain) -> dict[str, Region]:
    """By their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Region)}


class Row(NamedTuple):
    """What was found of one kind of block."""

    kind: str
    splits_tokens: bool
    ranks: int
    milliseconds: tuple[float, float]
    ratio: float
    peaks: tuple[float, float]
    sent: tuple[float, float]
    least: float


def measure(kind: str, splits_tokens: bool, size: Size) -> Row:
    """Compare both sides; on every rank."""
    torch.manual_seed(0)
    model = Chain([Block(kind, size.width) for _ in range(NUM_BLOCKS)])
    batch = torch.randn(size.samples, size.length, size.width, requires_grad=True)
    sides = [side(copy.deepcopy(model), batch, splits_tokens) for side in (Ours, Theirs)]
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
    ranks = dist.get_world_size()
    least = NUM_BLOCKS * REGIONS_OF_A_BLOCK * 2 * batch.nbytes * 2 * (ranks - 1) / ranks
    return Row(kind, splits_tokens, ranks, times, ratio, peaks, sent, least)


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
    if not isinstance(tensor, DTensor):
        return tensor
    whole = any(placement.is_partial() for placement in tensor.placements)
    return tensor.full_tensor() if whole else tensor.to_local()


def show(row: Row) -> None:
    """As a line of the table."""
    figures = [*row.milliseconds, row.ratio, *(number / 1e6 for number in (*row.peaks, *row.sent, row.least))]
    kind = f"{row.kind}, tokens" if row.splits_tokens else row.kind
    print(f"{kind:15} {row.ranks:5}", *(f"{figure:8.2f}" for figure in figures), flush=True)


def main(arguments: Sequence[str]) -> None:
    """All kinds on all numbers of ranks."""
    size = QUICK if "--quick" in arguments else USUAL
    torch.set_num_threads(1)
    columns = ("ms", "DTensor", "ratio", "peak MB", "DTensor", "sent MB", "DTensor", "least")
    print(f"{'block':15} {'ranks':>5}", *(f"{column:>8}" for column in columns))
    rows = []
    for ranks in size.ranks:
        for kind, splits_tokens in itertools.product(BLOCKS, (False, True)):
            rows.append(run_ranks(measure, ranks, kind, splits_tokens, size, timeout=600)[0])
            show(rows[-1])
    figures = {
        "worst_time_vs_dtensor": max(row.ratio for row in rows),
        "memory_vs_dtensor": max(row.peaks[0] / row.peaks[1] for row in rows),
        "bytes_over_minimum": max(row.sent[0] / row.least for row in rows if not row.splits_tokens),
        "tokens_bytes_over_minimum": max(row.sent[0] / row.least for row in rows if row.splits_tokens),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
