"""Copies on streams: what waits for what, on a device that only writes it down."""

from typing import Any

import pytest
import torch

from smp_strategy.activations import copy_stream as copies
from smp_strategy.activations.copy_stream import copies_of

CPU = torch.device("cpu")


class Event:
    def __init__(self, stream: "Stream") -> None:
        self.stream = stream


class Stream:
    """Stands in for a stream; what is queued on it is written down."""

    def __init__(self, device: torch.device) -> None:
        self.entered = 0
        self.waited_for: list[Stream] = []

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: Any) -> None: ...

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event.stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Stream]:
    """Copies as on an accelerator, and the stream that computes."""
    computing = Stream(CPU)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: computing)
    return copies._StreamCopies(CPU), computing


def test_both_directions_have_streams_of_their_own_beside_the_one_that_computes(device: Any) -> None:
    made, computing = device
    source, target = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    stored = made.store(source, target, after=[made.now()])
    back, loaded = made.load(target, after=[stored])
    assert torch.equal(back, source)
    assert len({stored.stream, loaded.stream, computing}) == 3
    assert (stored.stream.entered, loaded.stream.entered, computing.entered) == (1, 1, 0)


def test_a_store_comes_after_what_computes_its_source(device: Any) -> None:
    made, computing = device
    source = torch.ones(4, dtype=torch.uint8)
    stored = made.store(source, torch.zeros_like(source), after=[made.now()])
    assert stored.stream.waited_for == [computing]


def test_a_load_comes_after_its_store_and_after_what_had_its_memory_before(device: Any) -> None:
    made, computing = device
    source = torch.ones(4, dtype=torch.uint8)
    stored = made.store(source, torch.zeros_like(source), after=[])
    _, loaded = made.load(source, after=[stored])
    assert loaded.stream.waited_for == [stored.stream, computing]


def test_the_stream_that_computes_waits_and_the_host_does_not(device: Any) -> None:
    made, computing = device
    stored = made.store(torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), after=[])
    assert not computing.waited_for
    made.wait(stored)
    assert computing.waited_for == [stored.stream]


def test_on_a_cpu_a_copy_is_done_when_the_call_returns() -> None:
    plain = copies_of(CPU)
    source, target = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    stored = plain.store(source, target, after=[plain.now()])
    assert stored.query()
    assert torch.equal(target, source)
    back, loaded = plain.load(target, after=[stored])
    plain.wait(loaded)
    target.zero_()
    assert torch.equal(back, source)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_gets_back_what_it_has_sent() -> None:
    device = torch.accelerator.current_accelerator()
    made = copies_of(device)
    source = torch.randint(256, (1 << 20,), dtype=torch.uint8, device=device)
    target = made.host_memory(1 << 20)
    stored = made.store(source, target, after=[made.now()])
    back, loaded = made.load(target, after=[stored])
    made.wait(loaded)
    assert torch.equal(back, source)
