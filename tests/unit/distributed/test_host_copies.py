"""Copies on streams: what waits for what, on a device that only writes it down."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.checkpoint.storage.async_save import StagingBuffers
from smp_strategy.distributed import host_copies
from smp_strategy.distributed.host_copies import HostCopies

CPU = torch.device("cpu")


class Event:
    def __init__(self, stream: "Stream") -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.device.log.append(f"host waits for {self.stream.name}")


class Stream:
    """Stands in for a stream; what is queued on it is written down."""

    def __init__(self, name: str, device: "Device") -> None:
        self.name, self.device = name, device

    def __enter__(self) -> None:
        self.device.log.append(f"{self.name}: copy")

    def __exit__(self, *error: Any) -> None: ...

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.device.log.append(f"{self.name}: wait for {event.stream.name}")


class Device:
    """An accelerator in host memory: its streams, and what they were asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.computing = Stream("computing", self)
        self.names = iter(["outwards", "inwards"])
        self.is_used: list[tuple[Tensor, Stream]] = []

    def take_log(self) -> list[str]:
        taken, self.log = self.log, []
        return taken


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(host_copies, "_new_stream", lambda device: Stream(next(made.names), made))
    monkeypatch.setattr(host_copies, "_computing_on", lambda device: made.computing)
    monkeypatch.setattr(host_copies, "_record_use", lambda tensor, stream: made.is_used.append((tensor, stream)))
    return made


def test_a_store_comes_after_what_computes_its_source(device: Device) -> None:
    copies = HostCopies(CPU)
    source, target = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    copies.store(source, target, after=[copies.now()])
    assert torch.equal(target, source)
    assert device.log == ["outwards: wait for computing", "outwards: copy"]


def test_a_load_comes_after_its_store_and_after_what_had_its_memory_before(device: Device) -> None:
    copies = HostCopies(CPU)
    source = torch.ones(4, dtype=torch.uint8)
    stored = copies.store(source, torch.zeros_like(source), after=[])
    device.take_log()
    back, _ = copies.load(source, after=[stored])
    assert torch.equal(back, source)
    assert device.log == ["inwards: wait for outwards", "inwards: wait for computing", "inwards: copy"]


def test_the_stream_that_computes_waits_and_the_host_does_not(device: Device) -> None:
    copies = HostCopies(CPU)
    stored = copies.store(torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), after=[])
    assert device.take_log() == ["outwards: copy"]
    copies.wait(stored)
    assert device.log == ["computing: wait for outwards"]


def test_a_tensor_that_leaves_waits_for_its_computation_and_its_memory_waits_for_the_copy(device: Device) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    on_host = HostCopies(CPU).out(tensor)
    assert device.take_log() == ["outwards: wait for computing", "outwards: copy"]
    [(used, stream)] = device.is_used
    assert used is tensor
    assert stream.name == "outwards"
    assert torch.equal(on_host.wait(), tensor)
    assert device.log == ["host waits for outwards"]


def test_a_tensor_that_comes_waits_for_nothing_and_who_uses_it_lets_the_computation_wait(device: Device) -> None:
    memory = torch.arange(6.0).reshape(2, 3).t()
    landed = HostCopies(CPU).back(memory)
    assert landed.tensor.stride() == memory.stride()
    assert device.take_log() == ["inwards: copy"]
    assert not device.is_used
    assert torch.equal(landed.use(), memory)
    assert device.log == ["computing: wait for inwards"]
    [(used, stream)] = device.is_used
    assert used is landed.tensor
    assert stream is device.computing


def test_a_save_waits_for_all_copies_before_it_hands_out_its_buffers(device: Device) -> None:
    tensors = [torch.arange(6.0).reshape(2, 3).t(), torch.ones(4).t()]
    buffers = StagingBuffers(tensors)
    strided = [tensors[0], torch.arange(8.0)[::2]]
    taken = buffers.take(strided)
    copied = ["outwards: wait for computing", "outwards: copy"]
    assert device.log == [*copied, *copied, "host waits for outwards", "host waits for outwards"]
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(taken, strided, strict=True))


def test_on_a_cpu_a_copy_is_done_when_the_call_returns() -> None:
    plain = HostCopies(CPU)
    source, target = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    stored = plain.store(source, target, after=[plain.now()])
    assert stored.query()
    assert torch.equal(target, source)
    back, loaded = plain.load(target, after=[stored])
    plain.wait(loaded)
    target.zero_()
    assert torch.equal(back, source)


def test_a_tensor_of_another_process_is_fetched_after_its_event(device: Device) -> None:
    event = SimpleNamespace(wait=lambda: device.log.append("wait"))
    landed = HostCopies(CPU).bring(torch.arange(6.0).reshape(2, 3), (1, 2), event)
    assert device.log == ["inwards: copy", "wait"]  # inside of the stream
    assert landed.tensor.stride() == (1, 2)
    assert landed.tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_on_a_cpu_messages_are_copied_too() -> None:
    copies = HostCopies(CPU)
    tensor = torch.arange(6.0)
    landed = copies.back(copies.out(tensor).wait()).use()
    tensor.zero_()
    assert torch.equal(landed, torch.arange(6.0))


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_gets_back_what_it_has_sent() -> None:
    device = torch.accelerator.current_accelerator()
    copies = HostCopies(device)
    source = torch.randint(256, (1 << 20,), dtype=torch.uint8, device=device)
    target = copies.memory(1 << 20)
    stored = copies.store(source, target, after=[copies.now()])
    back, loaded = copies.load(target, after=[stored])
    copies.wait(loaded)
    assert torch.equal(back, source)
    assert torch.equal(copies.back(copies.out(source).wait()).use(), source)
