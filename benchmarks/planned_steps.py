"""Steps and memory of small models on this machine, beside what the planner says of them.

The device is measured first, with as many processes at a time as a layout has ranks, since cores share their memory:
products and additions of the sizes of a transformer block, launches of small kernels, and gathers of two sizes over
gloo, which give latency and bandwidth. The planner gets these figures and the model, and no figure of a layout.
"""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_bytes import Baseline, peak_of
from timing import over_ranks, seconds_of
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import BertConfig, BertForMaskedLM
from workloads import GPT, Batch, EngineSteps

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.commands.layout_planning import LayoutPlanner
from smp_strategy.model.trace.work import Link
from smp_strategy.planning.layouts.cluster import (
    BYTES_SHARE,
    DEVICES,
    FLOPS_SHARE,
    LINK_SHARE,
    Cluster,
    Device,
    JobLayout,
)
from smp_strategy.planning.layouts.estimate import Estimate
from smp_strategy.testing import run_ranks

__all__ = ["Compared", "compare", "kendall_tau"]

# Measured times that differ by less than this share are equal.
ALIKE = 0.03
# Matrices of the device's benchmark, and elements that are gathered.
IN_TURNS, FEW, MANY = 12, 1 << 10, 1 << 20


class Size(NamedTuple):
    """Sizes of the models, and the number of timed rounds."""

    width: int = 384
    blocks: int = 6
    length: int = 128
    vocabulary: int = 4096
    rounds: int = 5


QUICK = Size(48, 4, 16, 64, 1)
# One device and two: stages, shards, replicas, split layers; few large microbatches and many small ones.
LAYOUTS = [
    JobLayout(1, 1, 1, 1, 8, 1),
    JobLayout(1, 1, 1, 1, 2, 4),
    JobLayout(1, 1, 1, 1, 4, 4),
    JobLayout(1, 1, 1, 1, 4, 2, True),
    JobLayout(2, 1, 1, 1, 8, 1),
    JobLayout(2, 1, 1, 1, 4, 2),
    JobLayout(2, 1, 1, 1, 2, 4),
    JobLayout(2, 1, 1, 1, 4, 4),
    JobLayout(2, 1, 1, 1, 4, 2, True),
    JobLayout(1, 1, 1, 2, 2, 2),
    JobLayout(1, 1, 1, 2, 4, 2),
    JobLayout(1, 1, 2, 1, 2, 2),
    JobLayout(1, 1, 2, 1, 4, 2, True),
    JobLayout(1, 2, 1, 1, 2, 4),
]


class Bert(nn.Module):
    """A BERT that returns logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        sizes = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "vocab_size": size.vocabulary}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        depth = {"num_hidden_layers": size.blocks, "num_attention_heads": 6}
        self.bert = BertForMaskedLM(BertConfig(**sizes, **depth, **dropouts))

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(ids).logits


def models(size: Size) -> dict[str, Callable[[], nn.Module]]:
    """The models, by name."""
    gpt = GPT(size.vocabulary, separates_ends=True, length=size.length, width=size.width, num_blocks=size.blocks)
    return {"GPT": gpt.model, "BERT": lambda: Bert(size)}


class Tokens(NamedTuple):
    """Samples of a language model."""

    size: Size

    def batch(self, count: int) -> Batch:
        tokens = torch.randint(0, self.size.vocabulary, (2, count, self.size.length))
        return tokens[0], tokens[1]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


# --- the device ------------------------------------------------------------------------------------------------------


def measured_device(size: Size, ranks: int) -> Device:
    """This machine, while ``ranks`` processes compute."""
    figures = run_ranks(_device_figures, ranks, size, timeout=300.0)
    flops, nbytes, launch, latency, link = map(statistics.median, zip(*figures, strict=True))
    node_link = Link(latency, link / LINK_SHARE)
    return DEVICES["cpu"]._replace(
        peak_flops=flops / FLOPS_SHARE,
        bytes_per_second=nbytes / BYTES_SHARE,
        call_seconds=launch,
        node_link=node_link,
        network=node_link,
    )


def _device_figures(size: Size) -> tuple[float, float, float, float, float]:
    """FLOP/s, bytes/s of other kernels, seconds of a launch, latency of a gather, and bytes/s of it."""
    rows, wide = 2 * size.length, 4 * size.width
    x = torch.randn(rows, size.width)
    # In turns, as in a model: none of them is in a core's own cache when it is used again.
    weights = [torch.randn(size.width, wide) for _ in range(IN_TURNS)]
    hidden = [torch.randn(rows, wide) for _ in range(IN_TURNS)]
    products = _seconds(lambda: [x @ weight for weight in weights])
    others = _seconds(lambda: [F.layer_norm(F.gelu(each) + each, (wide,)) for each in hidden])
    ranks = dist.get_world_size()
    few, many = (_seconds(_gather(numel), rounds=20) for numel in (FEW, MANY))
    return (
        2 * x.numel() * wide * IN_TURNS / products,
        7 * hidden[0].nbytes * IN_TURNS / others,
        _launch_seconds(),
        few / max(1, ranks - 1),
        4 * (MANY - FEW) * (ranks - 1) / max(many - few, 1e-9) or 1e9,
    )


def _launch_seconds() -> float:
    """Of a kernel, with what autograd does for it: forward and backward of a block too small to compute anything."""
    size = Size(width=12, blocks=4, length=2, vocabulary=8)
    model, batch = models(size)["GPT"](), Tokens(size).batch(2)
    # A device whose kernels take a second each, whatever they do, counts them.
    counting = DEVICES["cpu"]._replace(peak_flops=inf, bytes_per_second=inf, call_seconds=1.0)
    kernels = (
        planner_of(size, model, counting, 1).estimate(JobLayout(1, 1, 1, 1, 1, 2)).estimates[0].seconds.computation
    )
    return _seconds(lambda: _loss(model, batch).backward()) / kernels


def _gather(numel: int) -> Callable[[], object]:
    mine = torch.zeros(numel)
    parts = [torch.zeros(numel) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(parts, mine)


def _seconds(call: Callable[[], object], rounds: int = 30) -> float:
    """Median of some rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[rounds // 5 :])


# --- the runs --------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """Prediction and measurement of a layout."""

    model: str
    layout: JobLayout
    estimate: Estimate
    seconds: float
    nbytes: int
    """Live bytes of tensors at most, on the fullest rank."""

    @property
    def time_error(self) -> float:
        """Share by which the prediction is too long."""
        return self.estimate.seconds.total / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """Share by which the prediction is too large."""
        return self.estimate.memory.total / self.nbytes - 1

    def row(self) -> str:
        """Line of a table."""
        layout, estimate = self.layout, self.estimate
        assert estimate.partition is not None
        chunks = f", {estimate.partition.chunks_per_stage} chunks" if estimate.partition.chunks_per_stage > 1 else ""
        again = ", recomputed" if layout.recomputes else ""
        return (
            f"| {self.model} | {layout}{chunks}{again} | {layout.microbatches} x {layout.samples} | "
            f"{1e3 * self.seconds:.0f} | {1e3 * estimate.seconds.total:.0f} ({self.time_error:+.0%}) | "
            f"{self.nbytes / 2**20:.1f} | {estimate.memory.total / 2**20:.1f} ({self.memory_error:+.1%}) |"
        )


def compare(quick: bool) -> list[Compared]:
    """All layouts of all models."""
    size = QUICK if quick else Size()
    layouts = LAYOUTS[::5] if quick else LAYOUTS
    found = []
    for ranks in (1, 2):
        device = measured_device(size, ranks)
        print(_described(device, ranks), flush=True)
        mine = [layout for layout in layouts if layout.world_size == ranks]
        for name, make in models(size).items():
            planner = planner_of(size, make(), device, ranks)
            estimates = [planner.estimate(layout).estimates[0] for layout in mine]
            measured = run_ranks(_measure, ranks, size, name, [_options(each) for each in estimates], timeout=900.0)[0]
            found += [Compared(name, *each[:2], *each[2]) for each in zip(mine, estimates, measured, strict=True)]
    return found


def planner_of(size: Size, module: nn.Module, device: Device, ranks: int) -> LayoutPlanner:
    """Planner of a model on one node of such devices."""
    cluster = Cluster(nodes=1, devices_per_node=ranks, device=device)
    return LayoutPlanner(module=module, step=partial(_loss, module), batch_of=Tokens(size).batch, cluster=cluster)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())


def _described(device: Device, ranks: int) -> str:
    machine = device.machine
    return (
        f"{ranks} at a time: products {machine.flops_per_second / 1e9:.0f} GFLOP/s, other kernels "
        f"{machine.bytes_per_second / 1e9:.1f} GB/s, launch {1e6 * machine.call_seconds:.1f} us, "
        f"link {1e6 * machine.link.latency:.0f} us, {machine.link.bytes_per_second / 1e9:.2f} GB/s"
    )


def _options(estimate: Estimate) -> tuple[int, dict[str, Any]]:
    """Samples of a replica, and the options of a run."""
    layout, options = estimate.layout, dict(estimate.layout.options)
    if layout.pp > 1:
        assert estimate.partition is not None
        options |= {"pipeline": "1f1b", "virtual_pipeline_degree": estimate.partition.chunks_per_stage}
    return layout.microbatches * layout.samples, options


def _measure(size: Size, name: str, cases: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[float, int]]:
    """Seconds of a step and peak of live bytes of each case; the layouts take turns."""
    torch.manual_seed(0)
    model, sides, peaks = models(size)[name](), [], []
    for samples, options in cases:
        baseline = Baseline()
        mine, batch = copy.deepcopy(model), Tokens(size).batch(samples)
        # The planner takes the optimizer to be a single kernel.
        optimizer = AdamW(mine.parameters(), lr=1e-4, fused=True)
        side = EngineSteps(Tokens(size), mine, optimizer, batch, SMPConfig.from_options(**options))
        for _ in range(2):
            side.step()
        peaks.append(_peak(side, baseline))
        sides.append(side)
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(size.rounds):
        for side, so_far in zip(sides, times, strict=True):
            so_far.append(seconds_of(side.step))
    for side in sides:
        side.engine.close()
    return [(statistics.median(each), peak) for each, peak in zip(times, peaks, strict=True)]


def _peak(side: EngineSteps, baseline: Baseline) -> int:
    """Live bytes of a step at most, on the fullest rank, without what is not the model's (messages in transit)."""
    report = side.engine.inspection.memory_report()
    (held,) = (each for each in report.ranks if each.rank == dist.get_rank())
    gradients = (parameter.grad for parameter in side.model.parameters() if parameter.grad is not None)
    rest = {each.untyped_storage()._cdata: each for each in (*baseline.since(), *side.model.parameters(), *gradients)}
    before = sum(each.untyped_storage().nbytes() for each in rest.values())
    # Nobody else holds the gradients of the last step when the next one begins.
    watched = (rest.popitem()[1] for _ in range(len(rest)))
    return int(over_ranks(peak_of(side.step, watched) - before + held.total - held.gathered, dist.ReduceOp.MAX))


def kendall_tau(rows: Sequence[Compared]) -> float:
    """Agreement of two orders of the layouts of each model: 1 if they are the same.

    Pairs whose measured times differ by less than ``ALIKE`` have no order.
    """
    signs = [
        1 if (one.seconds - two.seconds) * (one.estimate.seconds.total - two.estimate.seconds.total) > 0 else -1
        for one, two in itertools.combinations(rows, 2)
        if one.model == two.model and abs(one.seconds / two.seconds - 1) > ALIKE
    ]
    return sum(signs) / max(1, len(signs))
