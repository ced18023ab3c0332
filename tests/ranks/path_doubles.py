"""Paths between accelerators for ranks that have none: memory of the host plays the part of a device's.

:func:`with_paths` lets a forked rank take tensors of the host for those of a device. Copies are made at once; their
order is tested in ``tests/unit/pipeline/test_device_channels.py``.
"""

import os
import pickle
from functools import partial
from itertools import count
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import smp_strategy.pipeline.transport.device_channels.device_channel as device_channel
import smp_strategy.pipeline.transport.device_channels.nccl_channel as nccl_channel
import smp_strategy.pipeline.transport.open_channels as open_channels
from smp_strategy.distributed.device_paths.device_ipc import DeviceIpc
from smp_strategy.distributed.device_paths.ordered_edge import OrderedEdge
from smp_strategy.distributed.host_copies import HostCopies, Landed
from smp_strategy.pipeline.transport.device_channels.paths import DevicePath, NcclPath, SlotPath, StagePlaces
from smp_strategy.pipeline.transport.device_channels.slot_memories import IpcSlots, PageLockedSlots

HOST = torch.device("cpu")


class Reached:
    """An event of the host."""

    def record(self) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class IpcOfHost(DeviceIpc):
    """Memory without a name, which other processes open through ``/proc``."""

    def allocate(self, nbytes: int) -> Tensor:
        self.file = os.memfd_create("smp_double")
        os.ftruncate(self.file, nbytes)
        return torch.frombuffer(mmap(self.file, nbytes), dtype=torch.uint8)

    def export(self, memory: Tensor) -> bytes:
        return pickle.dumps((f"/proc/{os.getpid()}/fd/{self.file}", memory.nbytes))

    def open(self, exported: bytes) -> Tensor:
        path, nbytes = pickle.loads(exported)
        file = os.open(path, os.O_RDWR)
        memory = torch.frombuffer(mmap(file, nbytes), dtype=torch.uint8)
        os.close(file)
        return memory

    def new_event(self) -> tuple[Reached, bytes]:
        return Reached(), b"event"

    def open_event(self, exported: bytes) -> Reached:
        assert exported == b"event"
        return Reached()

    def write(self, source: Tensor, target: Tensor, written: Reached) -> None:
        target.copy_(source)

    def read(self, source: Tensor, strides: tuple[int, ...], written: Reached) -> Landed:
        return HostCopies(HOST).bring(source, strides)


class EdgeOfGloo(OrderedEdge):
    """The first send meets the first receive, whatever they are about."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.numbers, self.sent, self.closed = group, count(), [], []

    def send(self, message: Tensor) -> None:
        self.sent.append((message, self.group.send([message], 1 - self.group.rank(), next(self.numbers))))

    def receive(self, nbytes: int) -> Landed:
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8)
        self.group.recv([memory], 1 - self.group.rank(), next(self.numbers)).wait()
        return Landed(memory)

    def close(self, *, is_broken: bool = False) -> None:
        self.closed.append(is_broken)


def new_edge(one: int, other: int) -> EdgeOfGloo | None:
    group = dist.new_group([one, other], backend="gloo")
    return EdgeOfGloo(group) if dist.get_rank() in (one, other) else None


def paths_of(options: tuple[str, ...], places: StagePlaces, **parts: Any) -> list[DevicePath]:
    """The paths that :func:`device_paths` has, in its order; ``parts`` replace doubles."""
    ipc = parts.get("ipc", IpcOfHost)
    lock = parts.get("lock", lambda memory: None)
    every = [
        SlotPath("cuda_ipc", IpcSlots.name, places, lambda own, theirs: IpcSlots(own, theirs, ipc())),
        SlotPath(
            "shared_memory",
            PageLockedSlots.name,
            places,
            lambda own, theirs: PageLockedSlots(own, theirs, HostCopies(HOST), lock, lambda memory: None),
        ),
        NcclPath(places, True, parts.get("new_edge", new_edge)),
    ]
    return [path for path in every if path.option in options]


def with_paths(*options: str, least_bytes: int = 1, **parts: Any) -> None:
    """Let tensors of this rank's host take the paths of devices, from ``least_bytes`` on."""
    for module in (device_channel, open_channels):
        module.is_host = lambda device: False
    nccl_channel.LEAST_BYTES = IpcSlots.least_bytes = PageLockedSlots.least_bytes = least_bytes
    open_channels.device_paths = partial(paths_of, options, **parts)
