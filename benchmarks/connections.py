"""Tensors between two stages on two nodes, on one connection and on several; run by root::

    benchmarks/netlab.sh --ranks-per-node 1 --rate 800mbit --per-connection 200mbit python benchmarks/connections.py
    benchmarks/netlab.sh --ranks-per-node 1 --rate 800mbit python benchmarks/connections.py      # no limit of its own

Tensors follow each other in one direction, as in ``messages.py``, from which the measurement is. Both take turns in the
same processes. What counts is the median of the ratios of neighbours.

The last line is JSON: ``several_over_one``, the ratio of bandwidths for each size in MiB.
"""

import json
import sys
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from messages import stream

from smp_strategy.distributed.mesh import STAGE_CONNECTIONS
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.transport import Transport

MIB = 1 << 20
SIZES, ROUNDS = (1, 4, 16), 5


def transports() -> dict[int, Transport]:
    """By their number of connections."""
    more = [dist.new_group() for _ in range(STAGE_CONNECTIONS - 1)]
    return {
        1: Transport([0, 1], dist.new_group()),
        STAGE_CONNECTIONS: Transport([0, 1], dist.new_group(), more_groups=more),
    }


def main(arguments: Sequence[str]) -> None:
    """Run it on one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes, rounds = ((4,), 1) if "--quick" in arguments else (SIZES, ROUNDS)
    sides, found = transports(), {}
    for size in sizes:
        spec = TensorSpec.of(torch.zeros(size * MIB // 4))
        number = max(64 // size, 4)
        rates: list[dict[int, float]] = []
        for turn in range(rounds):
            order = list(sides)[:: 1 if turn % 2 else -1]
            rates.append({each: number * spec.nbytes / stream(sides[each], spec, number, 4)[0] for each in order})
        found[size] = median(each[STAGE_CONNECTIONS] / each[1] for each in rates)
        if dist.get_rank() == 0:
            speeds = ", ".join(f"{median(each[side] for each in rates) * 8e-6:7.0f} Mbit/s on {side}" for side in sides)
            print(f"{size:3} MiB: {speeds}", flush=True)
    for transport in sides.values():
        transport.close()
    if dist.get_rank() == 0:
        print(json.dumps({"several_over_one": {size: round(ratio, 3) for size, ratio in found.items()}}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
