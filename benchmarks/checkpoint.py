"""Sharded checkpoints, beside what the machine can do and beside PyTorch's own, in one run::

    python benchmarks/checkpoint.py            # two ranks, some minutes on two cores
    python benchmarks/checkpoint.py --quick    # some megabytes, two rounds: does it run?

Two ranks have one half each of the weights of a GPT and of AdamW's state for them, in float32. They save all of it as
one directory, and load it again. Sides take turns, each going first every other time; what counts is the median of the
ratios of neighbours, from the moment in which all ranks begin to the moment in which the last one ends.

* The stall of an asynchronous save, ``ShardedWriter.prepare``, beside ``Tensor.copy_`` of the same tensors into memory
  that has been used before, and beside the part of ``torch.distributed.checkpoint.async_save`` that training waits for,
  with a stager that keeps its memory, which is the fastest way that it has.
* A save, until it is on the disk, beside one ``write`` of the same bytes by each rank, and fsync.
* A load into the tensors of a model, all bytes verified, beside one ``read`` of the same bytes by each rank into memory
  that it gets for that. What was written lately comes from the system's memory, not from the disk, which would hide
  what we do.

The last line is JSON: ``async_stall_vs_memcpy``, ``async_stall_vs_dcp``, ``save_vs_raw_write``, ``load_vs_raw_read``:
our seconds over the others', so less than one is faster. Then what is seen beside harder rivals: ``stall_vs_libc``, the
copy of the C library, which does not read what it overwrites, and ``load_vs_warm_read``, into used memory;
and besides, ``save_vs_dcp`` and ``load_vs_dcp``, beside ``save`` and ``load`` of PyTorch's own.
"""

import ctypes
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from timing import seconds_of
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from workloads import GPT

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.testing import run_ranks

RANKS = 2
RATIOS = {
    "async_stall_vs_memcpy": ("stall", "memcpy"),
    "async_stall_vs_dcp": ("stall", "dcp_stall"),
    "save_vs_raw_write": ("save", "raw_write"),
    "load_vs_raw_read": ("load", "raw_read"),
    "stall_vs_libc": ("stall", "libc"),
    "load_vs_warm_read": ("load", "warm_read"),
    "save_vs_dcp": ("save", "dcp_save"),
    "load_vs_dcp": ("load", "dcp_load"),
}


class Size(NamedTuple):
    """How long it takes."""

    workload: GPT
    rounds: int


USUAL = Size(GPT(8192, separates_ends=True, length=1, width=768), 9)
TURNS = {"stall": 5, "memcpy": 5, "libc": 5}  # of what is short
QUICK = Size(GPT(256, separates_ends=True, length=1, width=48), 2)


class Sides:
    """What is timed, on one rank. Each prepares what it needs before time begins, and cleans up afterwards."""

    def __init__(self, workload: GPT, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self.tensors = share(workload, self.rank)
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.state = {"state_dict": {name: HeldTensor.whole(tensor) for name, tensor in self.tensors.items()}}
        self.writer = ShardedWriter(partial(dist.new_group, backend="gloo"))
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.memory = [torch.zeros_like(tensor) for tensor in self.tensors.values()]
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.writer.prepare(self.state).write(folder / "ours")
        dcp.save(dict(self.tensors), checkpoint_id=folder / "theirs")
        self.file = folder / "ours" / f"__{self.rank}_0.distcp"
        self.content = np.fromfile(self.file, dtype=np.uint8)

    def stall(self) -> float:
        """Ours."""
        prepared: list[Any] = []
        seconds = seconds_of(lambda: prepared.append(self.writer.prepare(self.state)))
        prepared[0].let_go()  # as after it has been written
        return seconds

    def dcp_stall(self) -> float:
        """Theirs."""
        futures: list[Any] = []
        path, stager = self.folder / "stalled", self.stager
        seconds = seconds_of(
            lambda: futures.append(
                dcp.async_save(dict(self.tensors), checkpoint_id=path, process_group=self.group, async_stager=stager)
            )
        )
        futures[0].result()
        self.remove("stalled")
        return seconds

    def memcpy(self) -> float:
        """Torch's copies."""
        return seconds_of(
            lambda: [copy.copy_(tensor) for copy, tensor in zip(self.memory, self.tensors.values(), strict=True)]
        )

    def libc(self) -> float:
        """The C library's."""
        return seconds_of(
            lambda: [
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
                for copy, tensor in zip(self.memory, self.tensors.values(), strict=True)
            ]
        )

    def save(self) -> float:
        """Ours, until it is on the disk."""
        seconds = seconds_of(lambda: self.writer.prepare(self.state, copy=False).write(self.folder / "saved"))
        self.remove("saved")
        return seconds

    def dcp_save(self) -> float:
        """Theirs."""
        seconds = seconds_of(lambda: dcp.save(dict(self.tensors), checkpoint_id=self.folder / "saved"))
        self.remove("saved")
        return seconds

    def raw_write(self) -> float:
        """The same bytes."""
        path = self.folder / f"raw_{self.rank}"

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                assert file.write(memoryview(self.content)) == len(self.content)
                os.fsync(file.fileno())

        seconds = seconds_of(write)
        path.unlink()
        return seconds

    def load(self) -> float:
        """Ours, into tensors that are there."""

        def load() -> None:
            wanted = {f"state_dict.{name}": HeldTensor.whole(tensor) for name, tensor in self.targets.items()}
            CheckpointReader.open(self.folder / "ours").fill(wanted)

        return self.checked(load)

    def dcp_load(self) -> float:
        """Theirs."""
        return self.checked(lambda: dcp.load(dict(self.targets), checkpoint_id=self.folder / "theirs"))

    def checked(self, load: Callable[[], object]) -> float:
        """A benchmark of wrong numbers is worth nothing."""
        for tensor in self.targets.values():
            tensor.zero_()
        seconds = seconds_of(load)
        if not all(torch.equal(self.targets[name], tensor) for name, tensor in self.tensors.items()):
            raise AssertionError("What was loaded is not what was saved.")
        return seconds

    def raw_read(self) -> float:
        """The same bytes, into new memory."""
        return seconds_of(lambda: self.read(np.empty(len(self.content), dtype=np.uint8)))

    def warm_read(self) -> float:
        """The same bytes, into memory that has been used."""
        return seconds_of(lambda: self.read(self.content))

    def read(self, memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        """The whole file."""
        with self.file.open("rb", buffering=0) as file:
            assert file.readinto(memoryview(memory)) == len(memory)

    def remove(self, name: str) -> None:
        """On one rank, when all are done."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder / name)
        dist.barrier()


def share(workload: GPT, rank: int) -> dict[str, Tensor]:
    """The weights that a rank has, and AdamW's state for them."""
    torch.manual_seed(rank)
    parameters = list(workload.model().named_parameters())
    half = len(parameters) // RANKS
    tensors = {}
    for name, parameter in parameters[rank * half : (rank + 1) * half]:
        tensors[name] = parameter.detach()
        tensors[f"{name}.exp_avg"] = torch.randn_like(tensors[name])
        tensors[f"{name}.exp_avg_sq"] = torch.rand_like(tensors[name])
        tensors[f"{name}.step"] = torch.tensor(100.0)
    return tensors


def measure(size: Size, folder: Path) -> tuple[dict[str, list[float]], int]:
    """Seconds of all sides in each round, and bytes of a rank; on every rank."""
    sides = Sides(size.workload, folder)
    names = list(dict.fromkeys(name for pair in RATIOS.values() for name in pair))
    for name in names:
        getattr(sides, name)()
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(size.rounds):
        # Neighbours are those of a ratio, so that what the machine does besides is the same for both.
        for name in names if number % 2 else reversed(names):
            found[name].append(median(getattr(sides, name)() for _ in range(TURNS.get(name, 1))))
    sides.stager.close()
    return found, sides.num_bytes


def show(found: Mapping[str, Sequence[float]], num_bytes: int) -> None:
    """As a table."""
    print(f"{num_bytes / 1e6:.1f} MB on each of {RANKS} ranks")
    print(f"{'':12} {'ms':>9} {'GB/s':>8}")
    for name, seconds in found.items():
        print(f"{name:12} {median(seconds) * 1e3:9.1f} {RANKS * num_bytes / median(seconds) / 1e9:8.2f}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """All sides."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINT_FOLDER")) as folder:
        size = QUICK if "--quick" in arguments else USUAL
        found, num_bytes = run_ranks(measure, RANKS, size, Path(folder), timeout=900)[0]
    show(found, num_bytes)
    figures = {
        name: median(one / other for one, other in zip(found[ours], found[theirs], strict=True))
        for name, (ours, theirs) in RATIOS.items()
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
