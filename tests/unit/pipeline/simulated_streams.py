"""Two devices in one process, whose streams run in a random order: a double for copies, CUDA IPC and NCCL.

The host only queues work. :meth:`Machine.step` does a piece of it, on any stream that can go on. Memory holds other
numbers until the work that fills it has run. An event that was never recorded counts as reached, as CUDA has it.
Messages of an edge match in order, as NCCL has it: a send waits for its receive, holds up all that is behind it on its
stream, and sizes must agree.
"""

from collections import deque
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from smp_strategy.distributed.device_paths.device_ipc import DeviceIpc
from smp_strategy.distributed.device_paths.ordered_edge import OrderedEdge
from smp_strategy.distributed.host_copies import Landed, OnHost

GARBAGE = 255


class Machine:
    """All streams."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.streams: list[Stream] = []
        self.exported: dict[bytes, object] = {}

    def step(self) -> bool:
        """Do the next piece of work of a stream that can go on; whether there was one."""
        order = [stream for stream in self.streams if stream.work]
        self.rng.shuffle(order)
        return any(stream.step() for stream in order)

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams), "the devices wait for ever"

    def export(self, thing: object) -> bytes:
        name = str(len(self.exported)).encode()
        self.exported[name] = thing
        return name


class Stream:
    """A queue of work: functions that tell whether they are done."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.work: deque[Callable[[], bool]] = deque()
        machine.streams.append(self)

    def do(self, work: Callable[[], object]) -> None:
        self.work.append(lambda: (work(), True)[1])

    def record(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        event = event or SimulatedEvent(self.machine)
        event.recorded += 1
        number = event.recorded
        self.do(lambda: setattr(event, "reached", number))
        return event

    def wait(self, event: "SimulatedEvent") -> None:
        number = event.recorded
        self.work.append(lambda: event.reached >= number)

    def step(self) -> bool:
        if self.work[0]():
            self.work.popleft()
            return True
        return False


class SimulatedEvent:
    """Counts how often it was recorded, and reached."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.recorded, self.reached = machine, 0, 0

    def query(self) -> bool:
        return self.reached >= self.recorded

    def synchronize(self) -> None:
        while not self.query():
            assert self.machine.step(), "the host waits for ever"


class SimulatedCopies:
    """As :class:`HostCopies`, of one device."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.computing, self.outwards, self.inwards = Stream(machine), Stream(machine), Stream(machine)

    def snapshot(self, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).fill_(GARBAGE)
        self.computing.do(lambda: copy.copy_(tensor))
        return copy

    def out(self, tensor: Tensor) -> OnHost:
        assert tensor.is_contiguous()
        memory = torch.full_like(tensor, GARBAGE)
        return OnHost(memory, self.out_to(tensor, memory))

    def out_to(self, tensor: Tensor, memory: Tensor) -> SimulatedEvent:
        self.outwards.wait(self.computing.record())
        self.outwards.do(lambda: memory.copy_(tensor))
        return self.outwards.record()

    def bring(self, source: Tensor, strides: tuple[int, ...], after: SimulatedEvent | None = None) -> Landed:
        if after is not None:
            self.inwards.wait(after)
        tensor = torch.empty_strided(source.shape, strides, dtype=source.dtype).fill_(GARBAGE)
        self.inwards.do(lambda: tensor.copy_(source))
        return Landed(tensor, self.inwards.record())


class SimulatedIpc(DeviceIpc):
    """Memory and events that both devices know."""

    def __init__(self, copies: SimulatedCopies) -> None:
        self.copies, self.machine = copies, copies.machine

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def export(self, memory: Tensor) -> bytes:
        return self.machine.export(memory)

    def open(self, exported: bytes) -> Tensor:
        return self.machine.exported[exported]

    def new_event(self) -> tuple[SimulatedEvent, bytes]:
        event = SimulatedEvent(self.machine)
        return event, self.machine.export(event)

    def open_event(self, exported: bytes) -> SimulatedEvent:
        return self.machine.exported[exported]

    def write(self, source: Tensor, target: Tensor, written: SimulatedEvent) -> None:
        self.copies.computing.do(lambda: target.copy_(source))
        self.copies.computing.record(written)

    def read(self, source: Tensor, strides: tuple[int, ...], written: SimulatedEvent) -> Landed:
        return self.copies.bring(source, strides, written)


class SimulatedEdge(OrderedEdge):
    """Both ends of an edge.

    Args:
        sender, receiver: the devices.
    """

    def __init__(self, sender: SimulatedCopies, receiver: SimulatedCopies) -> None:
        self.sender = sender
        self.sending, self.receiving = Stream(sender.machine), Stream(receiver.machine)
        self.sends: deque[dict] = deque()
        self.receives: deque[dict] = deque()

    def send(self, message: Tensor) -> None:
        self.sending.wait(self.sender.computing.record())
        self._queue(self.sending, self.sends, message)

    def receive(self, nbytes: int) -> Landed:
        memory = torch.full((nbytes,), GARBAGE, dtype=torch.uint8)
        self._queue(self.receiving, self.receives, memory)
        return Landed(memory, self.receiving.record())

    def close(self, *, is_broken: bool = False) -> None:
        pass

    def _queue(self, stream: Stream, ends: deque[dict], memory: Tensor) -> None:
        end = {"memory": memory, "has_begun": False, "is_done": False}
        ends.append(end)

        def work() -> bool:
            end["has_begun"] = True
            self._match()
            return end["is_done"]

        stream.work.append(work)

    def _match(self) -> None:
        while self.sends and self.receives and self.sends[0]["has_begun"] and self.receives[0]["has_begun"]:
            sent, received = self.sends.popleft(), self.receives.popleft()
            assert sent["memory"].shape == received["memory"].shape, "a send has met the receive of another message"
            received["memory"].copy_(sent["memory"])
            sent["is_done"] = received["is_done"] = True
