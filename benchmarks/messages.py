"""Tensors between two stages through shared memory, beside gloo, in one run::

    python benchmarks/messages.py            # 2 ranks, ten minutes
    python benchmarks/messages.py --quick    # one small round: does it run?

For each size, with the transport that stages use, in the same processes:

* *latency*: one tensor goes to the other stage and back, again and again; half of the time of a round trip.
* *bandwidth*: tensors follow each other in one direction, some of them under way at a time, and the receiver drops each
  when the next one comes; their bytes over the time until the last one is there. *CPU* is the processor time that both
  processes spend for that, which other work on the machine does not change much.
* *copies*: the bandwidth of one process that copies as many such tensors within its own memory, while the other waits.
  A tensor that goes through shared memory is copied once by its sender, so this is the bound of its bandwidth.

Then *steps*: those settings of ``pipeline.py`` that compute, on two ranks. Two engines have the same weights, batch,
cut and policy, and differ in ``stage_transport``. Their weights must be equal, bit for bit, before anything is timed.

The paths take turns, each going first every other time. What counts is the median of the ratios of neighbours.

The last line is JSON, with the worst ratios of 1 to 64 MiB: ``shm_over_gloo_bandwidth``; ``shm_over_copies``, of
bandwidths as well; ``shm_over_gloo_cpu``, of processor time. ``shm_over_gloo_latency`` is the ratio at 1 KiB, and
``shm_over_gloo_step`` the worst ratio of steps.
"""

import copy
import ctypes
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from pipeline import LEARNING_RATE, SHORT, Setting, settings
from pipeline import QUICK as QUICK_STEPS
from timing import seconds_of
from torch.optim import SGD
from workloads import EngineSteps

from smp_strategy.config.config import SMPConfig
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.open_channels import open_channels
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.testing import run_ranks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WAYS = ("gloo", "shared_memory")
COPIES = "copies"


class Amount(NamedTuple):
    """Amounts that are sent."""

    sizes: Sequence[int] = SIZES
    rounds: int = 9
    round_trips: int = 100
    """At most, and not more than a quarter of the bytes below."""
    stream_bytes: int = 512 * MIB
    """In one direction in a row."""
    window_bytes: int = 64 * MIB
    """Bytes under way at a time, but 4 tensors at least and 16 at most."""

    def under_way(self, size: int) -> int:
        """Tensors under way at a time."""
        return min(max(self.window_bytes // size, 4), 16)


QUICK = Amount((KIB, MIB), 1, 4, 8 * MIB)


class Figures(NamedTuple):
    """Of one path (or of copies) and size, in one round."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second."""
    cpu: float
    """Seconds of both processes for a GiB."""


def round_trips(transport: Transport, spec: TensorSpec, number: int) -> float:
    """Seconds of one way."""
    here, other = transport.rank, 1 - transport.rank
    tensor = torch.zeros(spec.size)
    dist.barrier()
    began = time.perf_counter()
    for trip in range(number):
        if here == 0:
            transport.send(tensor, spec, other, 2 * trip)
        tensor = transport.receive(spec, other, 2 * trip + 1 - here).wait()
        if here == 1:
            transport.send(tensor, spec, other, 2 * trip + 1)
    seconds = time.perf_counter() - began
    transport.flush()
    return seconds / number / 2


def stream(transport: Transport, spec: TensorSpec, number: int, under_way: int) -> tuple[float, float]:
    """Seconds until ``number`` tensors have arrived, and processor seconds of this process."""
    tensors = [torch.zeros(spec.size) for _ in range(under_way)]
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    if transport.rank == 0:
        for tag in range(number):
            transport.send(tensors[tag % under_way], spec, 1, tag)
            if tag >= under_way:
                transport.confirm(1, tag - under_way)
        transport.flush()
    else:
        receipts = [transport.receive(spec, 0, tag) for tag in range(under_way)]
        for tag in range(number):
            receipts.pop(0).wait()
            if tag + under_way < number:
                receipts.append(transport.receive(spec, 0, tag + under_way))
    dist.barrier()
    return time.perf_counter() - began, time.process_time() - worked


def copies(size: int, number: int, under_way: int) -> float:
    """Seconds in which rank 0 copies ``number`` tensors; on the other rank, seconds of waiting for that."""
    sources, targets = ([torch.zeros(size, dtype=torch.uint8) for _ in range(under_way)] for _ in range(2))
    dist.barrier()
    began = time.perf_counter()
    if dist.get_rank() == 0:
        for turn in range(number):
            place = turn % under_way
            ctypes.memmove(targets[place].data_ptr(), sources[place].data_ptr(), size)
    seconds = time.perf_counter() - began
    dist.barrier()
    return seconds


def measure(amount: Amount) -> dict[int, list[dict[str, Figures]]]:
    """Figures of each size, round and path."""
    transports = {}
    for way in WAYS:
        group = dist.new_group([0, 1])
        transports[way] = Transport([0, 1], group, None, open_channels([0, 1], group, way))
    found: dict[int, list[dict[str, Figures]]] = {size: [] for size in amount.sizes}
    for size in amount.sizes:
        spec = TensorSpec.of(torch.zeros(size // 4))
        number = max(2 * amount.under_way(size), min(amount.stream_bytes // size, 4 * amount.round_trips))
        trips = max(2, min(amount.stream_bytes // size // 4, amount.round_trips))
        for turn in range(-1, amount.rounds):  # the first one touches the memory
            figures = {}
            for way in WAYS[:: 1 if turn % 2 else -1]:
                latency = round_trips(transports[way], spec, trips)
                seconds, cpu = stream(transports[way], spec, number, amount.under_way(size))
                both = torch.tensor([cpu])
                dist.all_reduce(both)
                figures[way] = Figures(latency, number * size / seconds, both.item() / (number * size) * 1024 * MIB)
            seconds = copies(size, number, amount.under_way(size))
            figures[COPIES] = Figures(seconds / number, number * size / seconds, seconds / (number * size) * 1024 * MIB)
            if turn >= 0:
                found[size].append(figures)
    for transport in transports.values():
        transport.close()
    return found


def engine_of(setting: Setting, model: torch.nn.Module, batch: object, way: str) -> EngineSteps:
    """Training steps of a setting whose messages take one of the paths."""
    setting.place(model)
    config = SMPConfig(
        pipeline_parallel_degree=setting.num_ranks,
        microbatches=setting.num_microbatches,
        pipeline=setting.placement.name,
        virtual_pipeline_degree=setting.placement.num_chunks,
        auto_partition=setting.chooses_partition,
        stage_transport=way,
    )
    return EngineSteps(setting.workload, model, SGD(model.parameters(), LEARNING_RATE), batch, config)


def run(side: EngineSteps, steps: int) -> None:
    """Run some steps in a row."""
    for _ in range(steps):
        side.step()


def measure_steps(setting: Setting, rounds: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of a step under gloo and through shared memory, in each round."""
    torch.manual_seed(0)
    model, batch = setting.workload.model(), setting.workload.batch(setting.num_microbatches)
    sides = {way: engine_of(setting, copy.deepcopy(model), batch, way) for way in WAYS}
    for _ in range(2):
        for side in sides.values():
            side.step()
    gloo, shared = (side.engine.saved.full_state_dict() for side in sides.values())
    assert all(torch.equal(tensor, shared[name]) for name, tensor in gloo.items())
    found = []
    for turn in range(rounds):
        order = WAYS[:: 1 if turn % 2 else -1]
        times = {way: seconds_of(partial(run, sides[way], steps)) / steps for way in order}
        found.append((times["gloo"], times["shared_memory"]))
    for side in sides.values():
        side.engine.close()
    return found


def compare_steps(is_quick: bool) -> float:
    """Print a line for each setting; the worst ratio."""
    size, worst = (QUICK_STEPS if is_quick else SHORT), 0.0
    print(f"{'':32} {'gloo ms':>8} {'shared':>8} {'ratio':>7}")
    for setting in settings(2, size):
        if setting.sleeps:
            continue
        rounds = run_ranks(measure_steps, 2, setting, 2 if is_quick else 9, 2, timeout=600)[0]
        gloo, shared = (1e3 * median(times) for times in zip(*rounds, strict=True))
        found = median(mine / theirs for theirs, mine in rounds)
        print(f"{setting.name:32} {gloo:8.1f} {shared:8.1f} {found:7.3f}", flush=True)
        worst = max(worst, found)
    return worst


def ratio(rounds: Sequence[dict[str, Figures]], name: str, of: str = "gloo") -> float:
    """Median of shared memory over another path, or over copies."""
    return median(getattr(each["shared_memory"], name) / getattr(each[of], name) for each in rounds)


def main(arguments: Sequence[str]) -> None:
    """Run it and print it."""
    torch.set_num_threads(1)  # also those of the processes to come
    is_quick = "--quick" in arguments
    found = run_ranks(measure, 2, QUICK if is_quick else Amount(), timeout=900)[0]
    print(f"{'':10} {'latency us':>22} {'GB/s':>22} {'CPU s per GiB':>22} {'copies GB/s':>15}")
    print(f"{'KiB':>10} " + f"{'gloo':>8}{'shared':>7} {'ratio':>6} " * 3 + f"{'':8} {'ratio':>6}")
    for size, rounds in found.items():
        columns = []
        for name, factor in (("latency", 1e6), ("bandwidth", 1e-9), ("cpu", 1.0)):
            gloo, shared = (median(getattr(each[way], name) for each in rounds) * factor for way in WAYS)
            columns.append(f"{gloo:8.2f}{shared:7.2f} {ratio(rounds, name):6.2f} ")
        bound = median(each[COPIES].bandwidth for each in rounds) * 1e-9
        columns.append(f"{bound:8.2f} {ratio(rounds, 'bandwidth', COPIES):6.2f}")
        print(f"{size // KIB:10} " + "".join(columns), flush=True)
    large = [rounds for size, rounds in found.items() if size >= MIB]
    figures = {
        "shm_over_gloo_bandwidth": min(ratio(rounds, "bandwidth") for rounds in large),
        "shm_over_copies": min(ratio(rounds, "bandwidth", COPIES) for rounds in large),
        "shm_over_gloo_latency": ratio(found[KIB], "latency"),
        "shm_over_gloo_cpu": max(ratio(rounds, "cpu") for rounds in large),
        "shm_over_gloo_step": compare_steps(is_quick),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
