"""Paths between accelerators, the best one first, and the ranks that each is possible between, as far as is known.

A trial of the channels decides (:mod:`~smp_strategy.pipeline.transport.device_channels.probe`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, final

import torch
import torch.distributed as dist

from smp_strategy.config.options import StageTransport
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device_memory import device_memory
from smp_strategy.distributed.device_paths.device_ipc import CudaIpc
from smp_strategy.distributed.device_paths.ordered_edge import NcclEdge, OrderedEdge, nccl_options
from smp_strategy.distributed.device_paths.page_locking import page_lock, page_unlock
from smp_strategy.distributed.host_copies import HostCopies
from smp_strategy.distributed.shared_arena import Arena, PeerArena
from smp_strategy.pipeline.transport.channel import Channel
from smp_strategy.pipeline.transport.device_channels.device_channel import DeviceChannel
from smp_strategy.pipeline.transport.device_channels.nccl_channel import NcclChannel, OrderKeeper
from smp_strategy.pipeline.transport.device_channels.probe import PATTERN_BYTES
from smp_strategy.pipeline.transport.device_channels.slot_channel import SlotChannel
from smp_strategy.pipeline.transport.device_channels.slot_memories import IpcSlots, PageLockedSlots, SlotMemory

__all__ = ["DevicePath", "NcclPath", "SlotPath", "StagePlaces", "device_paths"]

_DOING: Final = "a trial of the paths between stages"


class StagePlaces(NamedTuple):
    """Ranks of this replica's stages, and what they share."""

    stage_ranks: Sequence[int]
    """Global rank of each stage."""
    group: dist.ProcessGroup
    device: torch.device
    arena: Arena | None
    """Arena of this rank; ``None``: there is none."""
    arenas: Mapping[int, PeerArena]
    """Arenas of the ranks that this one shares memory with, by global rank."""
    hosts: Mapping[int, Channel]
    """Channel for small tensors and those of the host, by global rank."""


class DevicePath(ABC):
    """A path between accelerators.

    Attributes:
        option: value of ``stage_transport`` that demands it.
        name: its name.
    """

    option: StageTransport
    name: str

    @abstractmethod
    def open(self, peers: Collection[int]) -> dict[int, DeviceChannel | str]:
        """Open a channel to each of ``peers``, or give the reason why there is none. Collective over all ranks."""

    def demanded(self, peers: Collection[int]) -> Collection[int]:
        """Ranks among ``peers`` that must be reached if the path is demanded."""
        return peers


@final
class SlotPath(DevicePath):
    """Path through slots, whose memory is made for two arenas, between ranks that share memory of the host."""

    def __init__(
        self,
        option: StageTransport,
        name: str,
        places: StagePlaces,
        memory: Callable[[Arena, PeerArena], SlotMemory],
    ) -> None:
        self.option, self.name = option, name
        self._places, self._memory = places, memory

    def open(self, peers: Collection[int]) -> dict[int, DeviceChannel | str]:
        return {peer: self._channel(peer) for peer in peers}

    def _channel(self, peer: int) -> DeviceChannel | str:
        places = self._places
        if places.arena is None or peer not in places.arenas:
            return "the ranks share no memory of the host"
        try:
            memory = self._memory(places.arena, places.arenas[peer])
            # Streams of their own: copies from one stage do not queue up behind those from another.
            copies = HostCopies(places.device)
            channel = SlotChannel(memory, places.arena, places.arenas[peer], copies, places.hosts[peer])
            channel.outgoing.prepare(PATTERN_BYTES)
        except RuntimeError as error:
            return str(error)
        return channel


@final
class NcclPath(DevicePath):
    """Path through NCCL, between neighbours: stages next to each other, and the last and the first.

    Args:
        new_edge: makes this rank's end of the edge between two global ranks, the sender first, in a call of all ranks;
            ``None``: this rank is neither.
    """

    option: StageTransport = "nccl"
    name = "NCCL"

    def __init__(
        self,
        places: StagePlaces,
        is_available: bool,
        new_edge: Callable[[int, int], OrderedEdge | None],
    ) -> None:
        self._places, self._is_available, self._new_edge = places, is_available, new_edge

    def demanded(self, peers: Collection[int]) -> Collection[int]:
        return [peer for peer in peers if self._is_neighbour(peer)]

    def open(self, peers: Collection[int]) -> dict[int, DeviceChannel | str]:
        memory = device_memory(self._places.device)
        mine = _Wish(memory and memory.identity, self._is_available, frozenset(self.demanded(peers)))
        wishes = dict(collectives.gather_objects((dist.get_rank(), mine), _DOING))
        # All ranks make the groups of all edges, in one order.
        pairs = sorted((one, other) for one, wish in wishes.items() for other in wish.peers)
        edges = {(one, other): self._new_edge(one, other) for one, other in pairs if not _why_not(wishes, one, other)}
        return {peer: _why_not(wishes, dist.get_rank(), peer) or self._channel(edges, peer) for peer in peers}

    def _channel(self, edges: Mapping[tuple[int, int], OrderedEdge | None], peer: int) -> DeviceChannel:
        places, here = self._places, dist.get_rank()
        outgoing, incoming = edges[here, peer], edges[peer, here]
        assert outgoing is not None
        assert incoming is not None
        keeper = OrderKeeper((outgoing, incoming), places.group, dist.get_group_rank(places.group, peer))
        return NcclChannel(keeper.outgoing, keeper.incoming, HostCopies(places.device), places.hosts[peer], keeper)

    def _is_neighbour(self, peer: int) -> bool:
        ranks = self._places.stage_ranks
        distance = abs(ranks.index(peer) - ranks.index(dist.get_rank()))
        return distance in (1, len(ranks) - 1)


class _Wish(NamedTuple):
    """A rank that asks for edges."""

    identity: str | None
    """Identity of its device, if it has one."""
    has_nccl: bool
    peers: frozenset[int]
    """Ranks at the other ends."""


def _why_not(wishes: Mapping[int, _Wish], one: int, other: int) -> str:
    """Reason why two ranks get no edges, the same on all ranks; empty: they do."""
    here, there = wishes[one], wishes[other]
    if other not in here.peers or one not in there.peers:
        return "the stages are no neighbours"
    if not (here.has_nccl and there.has_nccl):
        return "a rank has no NCCL"
    return "both ranks use the same GPU" if here.identity is not None and here.identity == there.identity else ""


def device_paths(places: StagePlaces) -> list[DevicePath]:
    """All paths between accelerators of this kind, the best one first."""
    device = places.device
    if device.type != "cuda":
        return []
    lock, unlock = partial(page_lock, device=device), partial(page_unlock, device=device)

    def ipc_slots(own: Arena, theirs: PeerArena) -> SlotMemory:
        return IpcSlots(own, theirs, CudaIpc(device))

    def page_locked_slots(own: Arena, theirs: PeerArena) -> SlotMemory:
        return PageLockedSlots(own, theirs, HostCopies(device), lock, unlock)

    return [
        SlotPath("cuda_ipc", IpcSlots.name, places, ipc_slots),
        SlotPath("shared_memory", PageLockedSlots.name, places, page_locked_slots),
        NcclPath(places, dist.is_nccl_available(), partial(_nccl_edge, device)),
    ]


def _nccl_edge(device: torch.device, one: int, other: int) -> OrderedEdge | None:
    """This rank's end of a new edge. Collective over all ranks, also over those that are not at its ends."""
    group = dist.new_group(sorted((one, other)), backend="nccl", pg_options=nccl_options())
    return NcclEdge(device, group) if dist.get_rank() in (one, other) else None
