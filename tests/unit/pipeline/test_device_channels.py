"""Channels between accelerators, on simulated ones: thousands of random programs, streams in a random order.

In each program two ranks send each other messages in an order of their own, compute them late and change them
afterwards. They ask for what comes in another order, early, late or never. What a rank asks for must arrive as it was
sent, and no device may wait for ever. Each rule that this depends on is also broken once, which must be noticed.
"""

import struct
from collections import deque
from random import Random

import pytest
import torch

import smp_strategy.pipeline.transport.device_channels.device_channel as device_channel
import smp_strategy.pipeline.transport.device_channels.nccl_channel as nccl
from smp_strategy.distributed.host_copies import OnHost
from smp_strategy.distributed.shared_arena import Arena, PeerArena
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import GlooChannel
from smp_strategy.pipeline.transport.device_channels.message_order import IncomingOrder, OutgoingOrder
from smp_strategy.pipeline.transport.device_channels.nccl_channel import NcclChannel
from smp_strategy.pipeline.transport.device_channels.slot_channel import SlotChannel
from smp_strategy.pipeline.transport.device_channels.slot_memories import IpcSlots, PageLockedSlots
from smp_strategy.pipeline.transport.device_channels.slots import CONTROL_BYTES, MessageSlot, SlotPool
from tests.unit.pipeline.simulated_streams import Machine, SimulatedCopies, SimulatedEdge, SimulatedIpc

MIB = 1 << 20


@pytest.fixture(autouse=True)
def everything_is_large_and_on_a_device(monkeypatch):
    monkeypatch.setattr(device_channel, "is_host", lambda device: False)
    monkeypatch.setattr(nccl, "LEAST_BYTES", 1)
    for memory in (IpcSlots, PageLockedSlots):
        monkeypatch.setattr(memory, "least_bytes", 1)
        monkeypatch.setattr(memory, "most_bytes", 3 * CONTROL_BYTES)


class Way:
    """Messages under way from one rank to another.

    Args:
        sender, receiver: channels.
        copies: devices of both.
        messages: values, by tag.
    """

    def __init__(self, sender, receiver, copies, messages):
        self.sender, self.receiver, self.copies = sender, receiver, copies
        self.to_send = deque(messages)
        self.to_ask = deque(messages)
        self.headers = {}
        self.unsent = []
        self.announcements = deque()
        self.values = {}


def value_of(rng, tag):
    size = rng.choice([(3,), (2, 5), (4, 3), (64,), (1,)])
    whole = torch.full(size, tag % 251, dtype=rng.choice([torch.float32, torch.uint8, torch.bfloat16]))
    layout = rng.choice(["plain", "transposed", "gaps"])
    if layout == "transposed":
        return whole.transpose(0, -1)
    return torch.stack((whole, whole), -1)[..., 0] if layout == "gaps" else whole


def send(way):
    """Compute a value late, send it, change it."""
    tag = way.to_send.popleft()
    value = way.values[tag]
    buffer = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(254)
    computing = way.copies[0].computing
    computing.do(lambda: buffer.copy_(value))
    header = way.sender.post(buffer, TensorSpec.of(buffer))
    computing.do(lambda: buffer.fill_(253))
    if isinstance(header, OnHost):
        way.unsent.append((tag, header))
    else:
        way.headers[tag] = header.clone()


def send_header(way):
    """A thread of the sender waits for the copy to the host."""
    tag, header = way.unsent.pop(0)
    way.headers[tag] = header.wait().clone()


def read(way):
    """The receiver's thread reads an announcement."""
    way.receiver._incoming.announced(way.announcements.popleft())


def can_ask(way):
    if not way.to_ask or way.to_ask[0] not in way.headers:
        return False
    number = struct.unpack("=q", way.headers[way.to_ask[0]].numpy()[-8:])[0]
    return not isinstance(way.receiver, NcclChannel) or number in way.receiver._incoming._landed


def ask(way):
    """Take a message, and check it where the device computes."""
    tag = way.to_ask.popleft()
    value, told = way.values[tag], way.headers[tag]
    header = way.receiver.header(TensorSpec.of(value))
    header.memory[: len(told)] = told
    assert header.is_there()
    tensor, copied = header.take()
    computing = way.copies[1].computing
    computing.wait(copied)

    def check():
        assert torch.equal(tensor, value), f"message {tag} is not what was sent"
        assert tensor.stride() == value.stride()

    computing.do(check)


def run(seed, connect, num_messages=6):
    """Run the program of ``seed``; what :func:`connect` has made besides the channels."""
    rng = Random(seed)
    machine = Machine(rng)
    devices = SimulatedCopies(machine), SimulatedCopies(machine)
    ways = [Way(None, None, devices[::order], range(num_messages)) for order in (1, -1)]
    made = connect(devices, ways)
    for way in ways:
        tags = list(range(num_messages))
        way.values = {tag: value_of(rng, tag) for tag in tags}
        near = rng.random()  # from one order for all to none at all
        way.to_send, way.to_ask = (
            deque(sorted(tags, key=lambda tag: tag + rng.uniform(0, num_messages * near))) for _ in range(2)
        )
        for _ in range(rng.choice([0, 0, 1, 3])):
            way.to_ask.remove(rng.choice(way.to_ask))  # abandoned
    eager = rng.random()
    while True:
        choices = [lambda way=way: send(way) for way in ways if way.to_send]
        choices += [lambda way=way: send_header(way) for way in ways if way.unsent]
        choices += [lambda way=way: read(way) for way in ways if way.announcements]
        choices += [lambda way=way: ask(way) for way in ways if can_ask(way)]
        if not choices:
            break
        rng.choice(choices)()
        while rng.random() < eager and machine.step():
            pass
    machine.finish()
    assert not any(way.to_ask or way.to_send for way in ways), "a host waits for ever"
    return made


# NCCL


def through_nccl(devices, ways, order=IncomingOrder):
    edges = SimulatedEdge(*devices), SimulatedEdge(*devices[::-1])
    channels = [
        NcclChannel(
            OutgoingOrder(edges[here], lambda number, nbytes, here=here: ways[here].announcements.append(nbytes)),
            order(edges[1 - here]),
            devices[here],
            GlooChannel(),
        )
        for here in (0, 1)
    ]
    for here, way in enumerate(ways):
        way.sender, way.receiver = channels[here], channels[1 - here]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("thousand", range(10))
def test_messages_through_nccl_arrive_in_ten_thousand_programs(thousand):
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        run(seed, through_nccl)


class ByHeaders(IncomingOrder):
    """Queues receives in the order in which the program asks."""

    def announced(self, nbytes):
        self._landed[next(self._numbers)] = nbytes

    def take(self, number):
        return self._edge.receive(self._landed[number])


class LastFirst(IncomingOrder):
    """Queues two receives in the wrong order."""

    def announced(self, nbytes):
        self._held = [*getattr(self, "_held", []), nbytes]
        if len(self._held) == 2:
            (first, second), self._held = self._held, []
            later = self._edge.receive(second)
            numbers = next(self._numbers), next(self._numbers)
            self._landed |= dict(zip(numbers, (self._edge.receive(first), later), strict=True))


@pytest.mark.parametrize("order", [ByHeaders, LastFirst])
def test_another_order_at_the_receiver_is_noticed(order):
    def connect(devices, ways):
        through_nccl(devices, ways, order)

    noticed = set()
    for seed in range(200):
        try:
            run(seed, connect)
        except AssertionError as error:
            noticed.add(str(error).partition("\n")[0].rstrip("0123456789"))
    assert "a send has met the receive of another message" in noticed
    if order is ByHeaders:
        assert "the devices wait for ever" in noticed  # because of messages that nobody asks for


# Slots


def through_slots(make):
    def connect(devices, ways):
        arenas = Arena(4 * MIB), Arena(4 * MIB)
        peers = [PeerArena(arena.address) for arena in arenas]
        channels = [
            SlotChannel(
                make(arenas[here], peers[1 - here], devices[here]),
                arenas[here],
                peers[1 - here],
                devices[here],
                GlooChannel(),
            )
            for here in (0, 1)
        ]
        for here, way in enumerate(ways):
            way.sender, way.receiver = channels[here], channels[1 - here]
        return channels, arenas

    return connect


def device_slots(own, theirs, device):
    return IpcSlots(own, theirs, SimulatedIpc(device))


def host_slots(own, theirs, device):
    def is_page_aligned(memory):
        assert memory.data_ptr() % 4096 == memory.nbytes % 4096 == 0

    return PageLockedSlots(own, theirs, device, is_page_aligned, is_page_aligned)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make", [device_slots, host_slots])
@pytest.mark.parametrize("part", range(5))
def test_messages_through_slots_arrive_in_a_thousand_programs(part, make):
    beside = inside = 0
    for seed in range(200 * part, 200 * (part + 1)):
        channels, arenas = run(seed, through_slots(make), num_messages=10)
        for channel in channels:
            beside += channel.outgoing.num_lacking
            inside += len(channel.outgoing.slots)
            assert len(channel.outgoing.slots) <= 3
        for channel, arena in zip(channels, arenas, strict=True):
            channel.close()
            arena.close()
    assert beside > 200, "all found a slot"
    assert inside > 400


def run_many(make):
    for seed in range(300):
        run(seed, through_slots(make), num_messages=10)


def unrecorded(monkeypatch):
    """The header goes before the event is recorded."""

    def write(self, source, target, written):
        self.copies.computing.do(lambda: target.copy_(source))

    monkeypatch.setattr(SimulatedIpc, "write", write)


def given_back_early(monkeypatch):
    """The receiver gives the slot back while its device still has to copy."""

    def fetch(self, slot, source, strides):
        slot.give_back()
        return self._ipc.read(source, strides, slot.written)

    monkeypatch.setattr(IpcSlots, "fetch", fetch)


def never_lent(monkeypatch):
    """The sender uses a slot that is not free."""
    monkeypatch.setattr(MessageSlot, "lend", lambda self: None)


@pytest.mark.parametrize("break_rule", [unrecorded, given_back_early, never_lent])
def test_a_broken_rule_of_slots_is_noticed(break_rule, monkeypatch):
    break_rule(monkeypatch)
    with pytest.raises(AssertionError, match="is not what was sent"):
        run_many(device_slots)


def test_a_header_before_the_copy_to_the_host_is_noticed(monkeypatch):
    monkeypatch.setattr(OnHost, "wait", lambda self: self.memory)
    with pytest.raises(AssertionError, match="is not what was sent"):
        run_many(host_slots)


@pytest.mark.parametrize("make", [device_slots, host_slots])
def test_all_slots_are_given_back(make):
    channels, _ = run(0, through_slots(make), num_messages=40)
    for channel in channels:
        channel.trim()
    for channel in channels:
        assert channel.outgoing.num_lacking < 40, "none was used again"
        used = [slot.is_free for slot in channel.outgoing.slots]
        assert len(used) == 3


def slot_of(nbytes):
    return MessageSlot(0, torch.ones(1, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8))


def test_a_pool_lends_the_smallest_free_slot_and_keeps_its_limit():
    pool = SlotPool(slot_of, 4 * MIB)
    large, small = pool.lend(2 * MIB), pool.lend(MIB)
    assert pool.lend(2 * MIB) is None
    assert pool.num_lacking == 1
    large.give_back()
    small.give_back()
    assert pool.lend(MIB // 2) is small
    assert pool.lend(MIB // 2) is large


def test_the_first_slot_may_exceed_the_limit():
    pool = SlotPool(slot_of, MIB)
    assert pool.lend(9 * MIB + 1).memory.nbytes == 10 * MIB
    assert pool.lend(1) is None


def test_a_pool_without_memory_has_no_slot():
    def fail(nbytes):
        raise torch.OutOfMemoryError("no memory")

    pool = SlotPool(fail, MIB)
    assert pool.lend(1) is None
    assert str(pool.error) == "no memory"
    with pytest.raises(torch.OutOfMemoryError):
        pool.prepare(1)
