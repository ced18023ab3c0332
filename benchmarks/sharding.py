"""Steps of models that are spread over ranks, beside FSDP2, DeepSpeed and DistributedDataParallel, in one run::

    python benchmarks/sharding.py                        # one node: 1, 2 and 4 local ranks
    benchmarks/netlab.sh python benchmarks/sharding.py   # two nodes of 2 ranks with a slow link between them; root

With ``--quick`` it takes seconds (and one node has 1 and 2 ranks): does it run?

A step is forward, backward and AdamW of a GPT with 8 blocks. All sides (benchmarks/sharding_sides.py) have the same
weights, and each rank has the same batch for all. They take turns in the same processes, each round beginning with
another one. A turn is several steps, from the moment in which all ranks begin to the moment in which the last of them
is through. One more step goes before, since a step may leave something to the next one: new values may still be on
their way when it ends. What counts is the median over rounds of the ratio of two sides' turns. Before anything is
timed, the weights of all sides are compared.

* Bytes on the slow link: what the network card of a node has sent, per step, averaged over the nodes.
* Peak memory: live bytes of tensors on the fullest rank in a step (benchmarks/live_bytes.py): parameters, gradients,
  optimizer state, buffers, activations.

The last line is JSON. Two nodes: ``A_vs_B``, how many times as fast as B a side A is, and
``slow_link_bytes_over_bound``, bytes per node and step over 1.5 times those of all parameters: half of them for each of
two gathers and one reduction. One node: ``one_node_time_vs_fsdp2`` and ``one_node_memory_vs_fsdp2``, ours over theirs
at the worst number of ranks, and ``world1_overhead``, what an engine costs where it has nothing to do.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from live_bytes import Baseline, peak_of
from sharding_sides import Make, Side, num_nodes, sides
from timing import over_ranks, seconds_of
from torch import Tensor
from workloads import GPT, Batch, Chain

from smp_strategy.testing import run_ranks

WARM_UPS = 2
QUIET_SECONDS = 0.1
SPEED_UPS = {
    "mics": ("fsdp2_full", "hsdp", "ds_zero3"),
    "mics_alike": ("fsdp2_full", "hsdp", "ds_zero3"),
    "hier": ("fsdp2_full", "ds_zero3"),
    "full": ("fsdp2_full", "ds_zero3"),
    "hsdp": ("fsdp2_full",),
    "replicas": ("ddp",),
    "state": ("ddp",),
}


class Size(NamedTuple):
    """How long it takes."""

    workload: GPT
    rounds: int
    steps: int
    """Of a turn."""
    ranks: tuple[int, ...]
    """Of one node."""


USUAL = Size(GPT(4096, separates_ends=True, length=256, width=264), 5, 2, (1, 2, 4))
QUICK = Size(GPT(256, separates_ends=True, length=16, width=48), 2, 1, (1, 2))


class Row(NamedTuple):
    """What was found of a side."""

    seconds: Sequence[float]
    """Per step, for each round."""
    sent: float | None
    """Bytes on the slow link per node and step."""
    peak: float
    """Bytes."""


Rows = Mapping[str, Row]


def measure(size: Size) -> Rows:
    """Compare all sides; on every rank."""
    torch.manual_seed(0)
    model = size.workload.model()
    torch.manual_seed(dist.get_rank())
    batch = size.workload.batch(1)
    found, peaks = {}, {}
    for name, make in sides().items():
        found[name], peaks[name] = warmed_up(make, size.workload, model, batch)
    check(list(model.parameters()), found)
    turns: dict[str, list[tuple[float, float | None]]] = {name: [] for name in found}
    names = list(found)
    for number in range(size.rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            turns[name].append(turn(found[name], size.steps))
    for side in found.values():
        side.close()
    return {name: row(turns[name], peaks[name]) for name in names}


def row(turns: Sequence[tuple[float, float | None]], peak: float) -> Row:
    """What the turns of a side say."""
    seconds, sent = zip(*turns, strict=True)
    return Row(seconds, None if sent[0] is None else median(sent), peak)


def turn(side: Side, steps: int) -> tuple[float, float | None]:
    """Seconds of a step until the last rank is through, and bytes that a node sends in it."""
    side.step()  # what it leaves to the next one is under way when time begins, as it is when time ends
    sent_before = sent_by_this_node()
    seconds = seconds_of(lambda: [side.step() for _ in range(steps)]) / steps
    if sent_before is None:
        return seconds, None
    sent = sent_by_this_node() - sent_before
    wait_until_quiet()
    # All ranks of a node read the same counter.
    return seconds, over_ranks(sent, dist.ReduceOp.SUM) / dist.get_world_size() / steps


def wait_until_quiet() -> None:
    """Until nothing crosses the slow link that the next side would have to wait for."""
    sent = None
    while sent != sent_by_this_node():
        sent = sent_by_this_node()
        time.sleep(QUIET_SECONDS)
    dist.barrier()


def sent_by_this_node() -> int | None:
    """Bytes over the slow link so far."""
    if num_nodes() == 1:
        return None
    card = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{card}/statistics/tx_bytes").read_text())


def warmed_up(make: Make, workload: GPT, model: Chain, batch: Batch) -> tuple[Side, float]:
    """A side after some steps, and its peak of live bytes in the last of them, on the fullest rank."""
    baseline = Baseline()
    side = make(workload, copy.deepcopy(model), batch)
    for _ in range(WARM_UPS):
        side.step()
    return side, over_ranks(peak_of(side.step, baseline.since()), dist.ReduceOp.MAX)


def check(before: Sequence[Tensor], found: Mapping[str, Side]) -> None:
    """A benchmark of wrong numbers is worth nothing."""
    first, *others = found
    expected = [weight.detach().clone() for weight in found[first].weights()]
    way = distance(before, expected)
    for name in others:
        off = distance(list(found[name].weights()), expected)
        if off > 1e-3 * way:
            raise AssertionError(f"{name} has other weights than {first}: {off:.2g} off on a way of {way:.2g}.")


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Between two models."""
    with torch.no_grad():
        return sum((one - other).square().sum().item() for one, other in zip(some, others, strict=True)) ** 0.5


def show(title: str, rows: Rows) -> None:
    """As a table."""
    print(f"{title:24} {'ms/step':>8} {'MB/node':>8} {'peak MB':>8}")
    for name, found in rows.items():
        sent = "" if found.sent is None else f"{found.sent / 1e6:.1f}"
        print(f"{name:24} {median(found.seconds) * 1e3:8.1f} {sent:>8} {found.peak / 1e6:8.1f}", flush=True)


def ratio(some: Row, other: Row) -> float:
    """How many times as long the first takes."""
    return median(one / another for one, another in zip(some.seconds, other.seconds, strict=True))


def speed_ups(rows: Rows) -> dict[str, float]:
    """Of all pairs that exist."""
    return {
        f"{name}_vs_{peer}": ratio(rows[peer], rows[name])
        for name in rows
        for peer in SPEED_UPS.get(name, ())
        if peer in rows
    }


def figures_of_two_nodes(rows: Rows, parameter_bytes: int) -> dict[str, float]:
    """The last line in the laboratory."""
    found = speed_ups(rows)
    sent = rows["hier"].sent
    assert sent is not None
    found["slow_link_bytes_over_bound"] = sent / (1.5 * parameter_bytes)
    return found


def figures_of_one_node(by_ranks: Mapping[int, Rows]) -> dict[str, float]:
    """The last line of local ranks."""
    several = [rows for ranks, rows in by_ranks.items() if ranks > 1]
    pairs = [(rows["full"], rows["fsdp2_full"]) for rows in several]
    found = {
        "world1_overhead": ratio(by_ranks[1]["replicas"], by_ranks[1]["plain"]) - 1,
        "one_node_time_vs_fsdp2": max(ratio(ours, theirs) for ours, theirs in pairs),
        "one_node_memory_vs_fsdp2": max(ours.peak / theirs.peak for ours, theirs in pairs),
    }
    for ranks, rows in by_ranks.items():
        found |= {f"{name}_{ranks}_ranks": value for name, value in speed_ups(rows).items()}
    return found


def main(arguments: Sequence[str]) -> None:
    """As one rank of several nodes, or as all ranks of one."""
    size = QUICK if "--quick" in arguments else USUAL
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        by_ranks = {}
        for ranks in size.ranks:
            by_ranks[ranks] = run_ranks(measure, ranks, size, timeout=900)[0]
            show(f"one node, {ranks} ranks", by_ranks[ranks])
        figures = figures_of_one_node(by_ranks)
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        rows = measure(size)
        nodes = num_nodes()
        dist.destroy_process_group()
        if os.environ["RANK"] != "0":
            return
        show(f"{nodes} nodes, {os.environ['WORLD_SIZE']} ranks", rows)
        figures = figures_of_two_nodes(rows, sum(weight.nbytes for weight in size.workload.model().parameters()))
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
