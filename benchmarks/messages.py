"""Tensors between two stages through shared memory, beside gloo, in one run::

    python benchmarks/messages.py            # 2 ranks, a minute or two
    python benchmarks/messages.py --quick    # one small round: does it run?

Two things are measured for each size, with the transport that stages use, in the same processes:

* *latency*: one tensor goes to the other stage and back, again and again; half of the time of a round trip.
* *bandwidth*: tensors follow each other in one direction, some of them under way at a time, and the receiver drops each
  when the next one comes; their bytes over the time until the last one is there. *CPU* is the processor time that both
  processes spend for that, which other work on the machine does not change much.

The paths take turns, each going first every other time. What counts is the median of the ratios of neighbours.

The last line is JSON: ``shm_over_gloo_bandwidth``, the worst ratio from 1 to 64 MiB; ``shm_over_gloo_latency``, the
ratio at 1 KiB; ``shm_over_gloo_cpu``, the worst ratio of processor time from 1 to 64 MiB.
"""

import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.open_channels import open_channels
from smp_strategy.pipeline.transport import Transport
from smp_strategy.testing import run_ranks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WAYS = ("gloo", "shared_memory")


class Amount(NamedTuple):
    """How much is sent."""

    sizes: Sequence[int] = SIZES
    rounds: int = 9
    round_trips: int = 100
    """At most, and not more than a quarter of the bytes below."""
    stream_bytes: int = 512 * MIB
    """In one direction in a row."""
    under_way: int = 4


QUICK = Amount((KIB, MIB), 1, 4, 8 * MIB)


class Figures(NamedTuple):
    """Of one path and size, in one round."""

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


def measure(amount: Amount) -> dict[int, list[dict[str, Figures]]]:
    """Figures of each size, round and path."""
    transports = {}
    for way in WAYS:
        group = dist.new_group([0, 1])
        transports[way] = Transport([0, 1], group, None, open_channels([0, 1], group, way))
    found: dict[int, list[dict[str, Figures]]] = {size: [] for size in amount.sizes}
    for size in amount.sizes:
        spec = TensorSpec.of(torch.zeros(size // 4))
        number = max(2 * amount.under_way, min(amount.stream_bytes // size, 4 * amount.round_trips))
        trips = max(2, min(amount.stream_bytes // size // 4, amount.round_trips))
        for turn in range(-1, amount.rounds):  # the first one touches the memory
            figures = {}
            for way in WAYS[:: 1 if turn % 2 else -1]:
                latency = round_trips(transports[way], spec, trips)
                seconds, cpu = stream(transports[way], spec, number, amount.under_way)
                both = torch.tensor([cpu])
                dist.all_reduce(both)
                figures[way] = Figures(latency, number * size / seconds, both.item() / (number * size) * 1024 * MIB)
            if turn >= 0:
                found[size].append(figures)
    for transport in transports.values():
        transport.close()
    return found


def ratio(rounds: Sequence[dict[str, Figures]], name: str) -> float:
    """Median of shared memory over gloo."""
    gloo, shared = WAYS
    return median(getattr(each[shared], name) / getattr(each[gloo], name) for each in rounds)


def main(arguments: Sequence[str]) -> None:
    """Run it and print it."""
    torch.set_num_threads(1)  # also those of the processes to come
    found = run_ranks(measure, 2, QUICK if "--quick" in arguments else Amount(), timeout=900)[0]
    print(f"{'':10} {'latency us':>22} {'GB/s':>22} {'CPU s per GiB':>22}")
    print(f"{'KiB':>10} " + f"{'gloo':>8}{'shared':>7} {'ratio':>6} " * 3)
    for size, rounds in found.items():
        columns = []
        for name, factor in (("latency", 1e6), ("bandwidth", 1e-9), ("cpu", 1.0)):
            gloo, shared = (median(getattr(each[way], name) for each in rounds) * factor for way in WAYS)
            columns.append(f"{gloo:8.2f}{shared:7.2f} {ratio(rounds, name):6.2f} ")
        print(f"{size // KIB:10} " + "".join(columns))
    large = [rounds for size, rounds in found.items() if size >= MIB]
    figures = {
        "shm_over_gloo_bandwidth": min(ratio(rounds, "bandwidth") for rounds in large),
        "shm_over_gloo_latency": ratio(found[KIB], "latency"),
        "shm_over_gloo_cpu": max(ratio(rounds, "cpu") for rounds in large),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
