"""Messages between two stages that share an accelerator, by each path, and training steps over them::

    python benchmarks/gpu/stage_messages.py

Paths: memory of the device that both processes open (``cuda_ipc``), page-locked memory that both map
(``shared_memory``), and page-locked memory of each with gloo in between (``gloo``). A path that is refused is listed
with the reason. (``nccl`` needs a GPU per rank.)

*Messages*, by size: do they arrive bit for bit; the time of one, half of a round trip; the bandwidth of many, several
of which are under way. Beside it, two plain copies within the device, which ``cuda_ipc`` makes as well: out of the
reach of later changes, and to the receiver.

*Steps*: a GPT on two stages by each path, beside one plain process that accumulates over the same microbatches. The
weights must be equal, bit for bit. Both processes share the device, so two stages cannot be faster than one process.

The last line is JSON: ``wrong``, cases with other bits; ``refused``, paths that are impossible here;
``ipc_over_copies``, time of a message of the largest size over that of two plain copies; ``ipc_over_host`` and
``ipc_over_one_process``, times of a step.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from model import GPT, Shape
from tables import Target, arguments, finish, seconds, show
from torch import Tensor

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.device import wait_for_all
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.open_channels import open_channels
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.testing import run_ranks

WAYS = ("cuda_ipc", "shared_memory", "gloo")
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
TINY_SIZES = (4 * KIB, MIB)
SHAPE = Shape(layers=8, width=2048, heads=16, length=2048)
TINY_SHAPE = Shape(layers=2, width=32, heads=2, length=16)
MICROBATCHES = 4
UNDER_WAY = 4


class Messages(NamedTuple):
    """Figures of one size on one path."""

    is_right: bool
    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second."""


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__)
    sizes, shape = (TINY_SIZES, TINY_SHAPE) if options.tiny else (SIZES, SHAPE)
    copies = run_ranks(plain_copies, 1, options.device, sizes)[0]
    rows, refused, wrong = [], {}, 0
    largest: dict[str, Messages] = {}
    for way in WAYS:
        found = run_ranks(messages, 2, options.device, way, sizes)[1]
        if isinstance(found, str):
            refused[way] = found
            continue
        for size, each in zip(sizes, found, strict=True):
            right = "yes" if each.is_right else "NO"
            rows.append([way, size // KIB, right, each.latency * 1e6, each.bandwidth / 1e9])
            wrong += not each.is_right
        largest[way] = found[-1]
    rows += [
        ["two copies", size // KIB, "", 1e6 * time_, size / time_ / 1e9]
        for size, time_ in zip(sizes, copies, strict=True)
    ]
    show("Messages", ["path", "KiB", "right", "us", "GB/s"], rows)

    times: dict[str, float] = {}
    times["one process"], expected = run_ranks(one_process, 1, options.device, shape)[0]
    for way in WAYS:
        if way not in refused:
            times[way], weights = run_ranks(two_stages, 2, options.device, way, shape, timeout=60)[0]
            wrong += not all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    show("Steps of two stages", ["path", "s"], [[name, each] for name, each in times.items()])
    for way, reason in refused.items():
        print(f"{way}: {reason}")
    ipc, host = times.get("cuda_ipc"), times["gloo"]
    figures = {
        "device": options.device,
        "wrong": wrong,
        "refused": sorted(refused),
        "ipc_over_copies": sizes[-1] / largest["cuda_ipc"].bandwidth / copies[-1] if "cuda_ipc" in largest else None,
        "ipc_over_host": ipc and ipc / host,
        "ipc_over_one_process": ipc and ipc / times["one process"],
    }
    bounds = (("wrong", 0), ("ipc_over_copies", 1.1), ("ipc_over_one_process", 1.1))
    finish(figures, [Target(name, bound, is_least=False) for name, bound in bounds])


def plain_copies(kind: str, sizes: Sequence[int]) -> list[float]:
    """Seconds of two copies within the device, for each size."""
    device, found = device_of(kind), []
    for size in sizes:
        one, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

        def copy(one: Tensor = one, other: Tensor = other) -> None:
            for _ in range(UNDER_WAY):
                one.copy_(other)
                other.copy_(one)

        found.append(seconds(copy, device, rounds=5, warm_ups=2) / UNDER_WAY)
    return found


def messages(kind: str, way: str, sizes: Sequence[int]) -> list[Messages] | str:
    """Messages of each size by one path; the reason if it is refused."""
    device = device_of(kind)
    try:
        channels = open_channels([0, 1], dist.group.WORLD, way, device)
    except ConfigError as error:
        return str(error)
    transport = Transport([0, 1], dist.group.WORLD, None, channels)
    found = [Messages(arrives(transport, size, device), *timed(transport, size, device)) for size in sizes]
    transport.close()
    return found


def arrives(transport: Transport, size: int, device: torch.device) -> bool:
    """Whether messages arrive bit for bit, though what was sent changes afterwards; the receiver knows."""
    first = (torch.arange(size, device=device) % 251).to(torch.uint8)
    spec, is_right = TensorSpec.of(first), True
    for turn in range(3):  # memory is used again
        if transport.rank == 0:
            for tag in range(UNDER_WAY):
                tensor = first + tag * (turn + 1)
                transport.send(tensor, spec, 1, tag)
                tensor.zero_()
        else:
            receipts = [transport.receive(spec, 0, tag) for tag in range(UNDER_WAY)]
            for tag, receipt in reversed(list(enumerate(receipts))):
                is_right &= torch.equal(receipt.wait(), first + tag * (turn + 1))
        transport.flush()
        dist.barrier()
    return is_right


def timed(transport: Transport, size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one message, and bytes per second of many."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    spec, here = TensorSpec.of(tensor), transport.rank
    trips, many = (20, 32) if size < 16 * MIB else (4, 12)
    for number in (2, trips):  # the first ones do not count
        dist.barrier()
        begin = time.perf_counter()
        for trip in range(number):
            if here == 0:
                transport.send(tensor, spec, 1, 2 * trip)
            tensor = transport.receive(spec, 1 - here, 2 * trip + 1 - here).wait()
            wait_for_all(device)
            if here == 1:
                transport.send(tensor, spec, 0, 2 * trip + 1)
        latency = (time.perf_counter() - begin) / number / 2
        transport.flush()
    dist.barrier()
    begin = time.perf_counter()
    if here == 0:
        for tag in range(many):
            transport.send(tensor, spec, 1, tag)
            if tag >= UNDER_WAY:
                transport.confirm(1, tag - UNDER_WAY)
    else:
        receipts = [transport.receive(spec, 0, tag) for tag in range(UNDER_WAY)]
        for tag in range(many):
            receipts.pop(0).wait()
            if tag + UNDER_WAY < many:
                receipts.append(transport.receive(spec, 0, tag + UNDER_WAY))
    transport.flush()
    wait_for_all(device)
    dist.barrier()
    return latency, many * size / (time.perf_counter() - begin)


def one_process(kind: str, shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """Seconds of a step of a plain loop, and the weights after all of them."""
    device, model, optimizer = begin(kind, shape)
    batch = shape.batch(MICROBATCHES, device)

    def step() -> None:
        optimizer.zero_grad()
        for part in batch.split(1):
            (model.loss(part) / MICROBATCHES).backward()
        optimizer.step()

    time_ = seconds(step, device, rounds=5, warm_ups=2)
    return time_, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def two_stages(kind: str, way: str, shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """The same on one of two stages."""
    device, model, optimizer = begin(kind, shape)
    options: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "stage_transport": way}
    engine = Engine(SMPConfig(**options), device=device)
    engine.attach(model, [optimizer])
    batch = shape.batch(MICROBATCHES, device)

    def step() -> None:
        result = engine.train_step(model.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones((), device=device), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)

    time_ = seconds(step, device, rounds=5, warm_ups=2)
    return time_, {name: tensor.cpu() for name, tensor in engine.saved.full_state_dict().items()}


def begin(kind: str, shape: Shape) -> tuple[torch.device, GPT, torch.optim.Optimizer]:
    """The model, alike everywhere; kernels that add in one order only."""
    torch.use_deterministic_algorithms(True)
    device = device_of(kind)
    torch.manual_seed(0)
    model = GPT(shape).to(device)  # in half precision, sums over microbatches would be kept in another way
    return device, model, torch.optim.SGD(model.parameters(), lr=0.01)


def device_of(kind: str) -> torch.device:
    """The device that all ranks share, made the current one."""
    if kind == "cpu":
        return torch.device(kind)
    torch.accelerator.set_device_index(0)
    return torch.device(kind, 0)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)  # processes are forked
    main()
