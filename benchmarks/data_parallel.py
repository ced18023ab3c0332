"""Data-parallel steps, beside those of torch's DistributedDataParallel and ZeroRedundancyOptimizer, in one run::

    python benchmarks/data_parallel.py            # 1, 2 and 4 ranks, some minutes on two cores
    python benchmarks/data_parallel.py --nodes    # 2 and 4 ranks on one node, then two nodes with a slow link; root
    python benchmarks/data_parallel.py --quick    # 1 and 2 ranks, two rounds: does it run?

A step is forward, backward and AdamW of a GPT, from the moment in which all ranks begin to the moment in which the last
of them has the new weights. Both sides have the same weights and batches, run in the same processes over gloo, and take
turns, each going first every other time; what counts is the median of the ratios of neighbours. Before anything is
timed, the weights of both are compared.

* One rank, beside a plain loop: what our engine costs where it has nothing to do.
* Replicas, beside DDP: gradients are averaged while backward runs.
* Replicas with ``shard_optimizer_state``, beside DDP with ZeroRedundancyOptimizer: the state of the optimizer is dealt
  out over the replicas. Also compared: the bytes of state on the rank that has most.

The last line is JSON: ``world1_overhead`` (ours over the plain loop, less one), ``dp_vs_ddp`` and ``state_vs_zero``
(ours over theirs, the worst number of ranks), ``state_share`` (bytes of state on the fullest rank over all of them,
times the number of ranks: one is perfect), and the same of ZeroRedundancyOptimizer. With ``--nodes`` replicas without
sharded state are compared only: ``one_node_vs_ddp``, and what ``data_parallel_nodes.py`` finds in ``netlab.sh`` at 200
Mbit/s, ``hierarchical_vs_ddp_200mbit``, ``hook_vs_ddp_200mbit``, ``slow_link_bytes_over_bound``,
``ddp_bytes_over_bound``.
"""

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from timing import over_ranks, seconds_of
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from workloads import GPT, Batch, EngineSteps

from smp_strategy.config.config import SMPConfig
from smp_strategy.testing import run_ranks

LEARNING_RATE, WARM_UPS = 1e-3, 3


class Size(NamedTuple):
    """How long it takes."""

    workload: GPT
    rounds: int
    ranks: tuple[int, ...]


USUAL = Size(GPT(8192, separates_ends=True, length=256), 9, (1, 2, 4))
QUICK = Size(GPT(256, separates_ends=True, length=16, width=48), 2, (1, 2))


class Ours(EngineSteps):
    """An engine."""

    def __init__(self, workload: GPT, model: nn.Module, batch: Batch, *, shards: bool) -> None:
        config = SMPConfig(pipeline_parallel_degree=1, shard_optimizer_state=shards)
        super().__init__(workload, model, AdamW(model.parameters(), LEARNING_RATE), batch, config)

    def state_bytes(self) -> int:
        return bytes_of(self.optimizer)


class Theirs:
    """A plain loop, with DistributedDataParallel where there are several ranks."""

    def __init__(self, workload: GPT, model: nn.Module, batch: Batch, *, shards: bool) -> None:
        self.model, self._loss, self._batch = model, workload.loss, batch
        self._wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        self.optimizer: Optimizer = AdamW(model.parameters(), LEARNING_RATE)
        if shards:
            self.optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LEARNING_RATE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self._wrapped(self._batch[0]), self._batch[1]).backward()
        self.optimizer.step()

    def state_bytes(self) -> int:
        return bytes_of(getattr(self.optimizer, "optim", self.optimizer))


class Row(NamedTuple):
    """What was found."""

    ranks: int
    shards: bool
    ours: float
    theirs: float
    ratio: float
    share_ours: float
    share_theirs: float


def measure(size: Size, shards: bool) -> Row:
    """Compare both sides; on every rank."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of ZeroRedundancyOptimizer about its own parts
    model = size.workload.model()
    torch.manual_seed(dist.get_rank())
    batch = size.workload.batch(1)
    twin = copy.deepcopy(model)
    sides = [kind(size.workload, each, batch, shards=shards) for kind, each in ((Ours, model), (Theirs, twin))]
    for side in sides:
        for _ in range(WARM_UPS):
            side.step()
    check(model.parameters(), twin.parameters())
    turns = [[0.0, 0.0] for _ in range(size.rounds)]
    for number, times in enumerate(turns):
        for position in (0, 1) if number % 2 else (1, 0):
            times[position] = seconds_of(sides[position].step)
    ours, theirs = zip(*turns, strict=True)
    shares = [share(side.state_bytes()) for side in sides]
    sides[0].engine.close()
    ratio = median(mine / other for mine, other in turns)
    return Row(dist.get_world_size(), shards, median(ours), median(theirs), ratio, *shares)


def check(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """A benchmark of wrong numbers is worth nothing. AdamW enlarges what is rounded in another order."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=LEARNING_RATE)


def bytes_of(optimizer: Optimizer) -> int:
    """What it keeps for parameters."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    )


def share(here: int) -> float:
    """The fullest rank's part of all bytes, times the number of ranks."""
    return over_ranks(here, dist.ReduceOp.MAX) / over_ranks(here, dist.ReduceOp.SUM) * dist.get_world_size()


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """The last line."""
    replicas = [row for row in rows if row.ranks > 1]
    sharded = [row for row in replicas if row.shards]
    found = {
        "world1_overhead": max(row.ratio for row in rows if row.ranks == 1) - 1,
        "dp_vs_ddp": max(row.ratio for row in replicas if not row.shards),
        "state_vs_zero": max(row.ratio for row in sharded),
        "state_share": max(row.share_ours for row in sharded),
        "state_share_zero": max(row.share_theirs for row in sharded),
    }
    return {name: round(value, 4) for name, value in found.items()}


def between_nodes(rate: str, *, is_quick: bool) -> dict[str, float]:
    """The last line of ``data_parallel_nodes.py`` at ``rate``."""
    folder = Path(__file__).parent
    command = [folder / "netlab.sh", "--rate", rate, sys.executable, folder / "data_parallel_nodes.py"]
    output = subprocess.run(
        [*command, "--quick"] if is_quick else command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200
    ).stdout
    print(output, end="", flush=True)
    found = json.loads(output.splitlines()[-1])
    return {f"{name}_{rate}" if name.endswith("_vs_ddp") else name: value for name, value in found.items()}


def main(arguments: Sequence[str]) -> None:
    """Run it for every number of ranks."""
    size = QUICK if "--quick" in arguments else USUAL
    has_nodes = "--nodes" in arguments
    torch.set_num_threads(1)
    print(f"{'':28} {'ours ms':>8} {'theirs':>8} {'ratio':>7} {'state':>7} {'theirs':>7}")
    rows = []
    for ranks in [ranks for ranks in size.ranks if ranks > 1] if has_nodes else size.ranks:
        for shards in (False, True) if ranks > 1 and not has_nodes else (False,):
            row = run_ranks(measure, ranks, size, shards, timeout=600)[0]
            name = f"{ranks} ranks{', state dealt out' if shards else ''}"
            print(
                f"{name:28} {row.ours * 1e3:8.1f} {row.theirs * 1e3:8.1f} {row.ratio:7.3f} {row.share_ours:7.3f} "
                f"{row.share_theirs:7.3f}",
                flush=True,
            )
            rows.append(row)
    if has_nodes:
        one_node = {"one_node_vs_ddp": round(max(row.ratio for row in rows), 4)}
        print(json.dumps(one_node | between_nodes("200mbit", is_quick="--quick" in arguments)))
        return
    print(json.dumps(figures(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
