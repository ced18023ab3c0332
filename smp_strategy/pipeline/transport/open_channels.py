"""Choice of the channel between each two stages: by trying, once, when the stages are connected.

Two ranks of one machine share memory unless containers, users or the system keep them apart, which nobody can tell
beforehand. So each tries to open the memory of each other, and all ranks learn who could not. The paths between
accelerators are tried with data, the best one first; two ranks take the first one that has worked in both directions.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.config.options import StageTransport
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.device import is_host, wait_for_all
from smp_strategy.distributed.message_tags import BANDWIDTH
from smp_strategy.distributed.shared_arena import open_arenas
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Channel, GlooChannel
from smp_strategy.pipeline.transport.device_channels.paths import StagePlaces, device_paths
from smp_strategy.pipeline.transport.device_channels.probe import give_up, probe
from smp_strategy.pipeline.transport.shared_memory_channel import SharedMemoryChannel
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["MeasuredPath", "measure_paths", "open_channels", "render_paths"]

MEASURED_BYTES: Final = 1 << 22
HOST: Final = torch.device("cpu")
_OF_DEVICES: Final = ("cuda_ipc", "nccl")
_ROUNDS: Final = 3


def open_channels(
    stage_ranks: Sequence[int],
    group: dist.ProcessGroup,
    chosen: StageTransport = "auto",
    device: torch.device = HOST,
) -> list[Channel]:
    """Open a channel between this rank's stage and each. Collective over all ranks.

    Raises:
        ConfigError: a path is asked for that is impossible between two ranks.
    """
    if chosen in _OF_DEVICES and is_host(device):
        raise ConfigError(
            f"`stage_transport={chosen}` is for tensors of CUDA devices, but the ranks compute on {device}. Use `auto`."
        )
    # Each stage has its own, because each may have other reasons (`Channel.declined`).
    channels: dict[int, Channel] = {rank: GlooChannel() for rank in stage_ranks}
    if chosen == "gloo":
        return [channels[rank] for rank in stage_ranks]
    own, theirs, failures = open_arenas(group)
    if failures and chosen == "shared_memory":
        (one, other), reason = min(failures.items())
        raise _impossible(chosen, one, other, reason)
    # Each channel takes the place of the one before, and keeps it for the tensors that it does not take.
    if own is not None:
        channels |= {rank: SharedMemoryChannel(own, arena, channels[rank]) for rank, arena in theirs.items()}
    if not is_host(device):
        _connect_devices(StagePlaces(stage_ranks, group, device, own, theirs, channels), channels, chosen)
    return [channels[rank] for rank in stage_ranks]


def _connect_devices(places: StagePlaces, channels: dict[int, Channel], chosen: StageTransport) -> None:
    """Put channels between accelerators into ``channels``, whose present ones stay for small tensors.

    Raises:
        ConfigError: a path is asked for that is impossible between two ranks.
    """
    unconnected = set(places.stage_ranks) - {dist.get_rank()}
    declined: dict[int, list[str]] = {peer: [] for peer in unconnected}
    paths = [path for path in device_paths(places) if chosen in ("auto", path.option)]
    if chosen in _OF_DEVICES and not paths:
        raise ConfigError(f"`stage_transport={chosen}` does not exist for tensors on {places.device}. Use `auto`.")
    for path in paths:
        # Also with nothing left to connect: both calls are collective, and another rank may have something left.
        opened = path.open(unconnected)
        failed = probe(opened, places.group, places.device)
        for peer, channel in opened.items():
            if peer in failed:
                declined[peer].append(f"{path.name}: {failed[peer]}")
                if not isinstance(channel, str):
                    give_up(channel)
            elif not isinstance(channel, str):
                channels[peer] = channel
                unconnected.discard(peer)
        if chosen != "auto":
            lacking = {peer: failed[peer] for peer in path.demanded(sorted(failed))}
            _refuse(chosen, lacking, places.group)
    for peer, reasons in declined.items():
        channels[peer].declined = tuple(reasons)


def _refuse(chosen: StageTransport, failed: Mapping[int, str], group: dist.ProcessGroup) -> None:
    """Refuse a path that was asked for and has failed to some ranks, on all ranks of ``group``."""
    # Gathered, so that all ranks raise the same error, and none waits for one that has raised it.
    everyones = collectives.gather_objects(
        (dist.get_rank(), dict(failed)), "a trial of the paths between stages", group
    )
    for one, reasons in sorted(everyones):
        for other, reason in sorted(reasons.items()):
            raise _impossible(chosen, one, other, reason)


def _impossible(chosen: StageTransport, one: int, other: int, reason: str) -> ConfigError:
    place = "" if chosen == "nccl" else ", or place the stages of a replica on one machine (`placement_strategy`)"
    return ConfigError(
        f"`stage_transport={chosen}` is impossible between the ranks {one} and {other}: {reason}. Use `auto`{place}."
    )


class MeasuredPath(NamedTuple):
    """Path of large tensors from one rank to another."""

    source: int
    target: int
    name: str
    bytes_per_second: float
    declined: tuple[str, ...] = ()
    """Better paths, each with the reason why it is not taken."""


def measure_paths(transport: Transport, device: torch.device) -> list[MeasuredPath]:
    """Measure the paths from each stage to the next one, of all replicas. Collective over all ranks."""
    stage = transport.stage_ranks.index(transport.rank)
    payload = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=device)
    ready = torch.zeros(1, dtype=torch.uint8, device="cpu")
    measured: list[MeasuredPath] = []
    # A rank is at one end of one path at a time.
    for parity in (0, 1):
        if stage % 2 == parity and stage + 1 < len(transport.stage_ranks):
            for _ in range(_ROUNDS):
                transport.receive(TensorSpec.of(ready), stage + 1, BANDWIDTH).wait()
                transport.send(payload, TensorSpec.of(payload), stage + 1, BANDWIDTH)
                transport.confirm(stage + 1, BANDWIDTH)
        elif stage % 2 != parity and stage > 0:
            seconds = min(_seconds(transport, stage - 1, payload, ready) for _ in range(_ROUNDS))
            source, declined = transport.stage_ranks[stage - 1], transport.channels[stage - 1].declined
            name = transport.path_of(TensorSpec.of(payload), stage - 1)
            measured.append(MeasuredPath(source, transport.rank, name, MEASURED_BYTES / seconds, declined))
    transport.flush()
    return sorted(sum(collectives.gather_objects(measured, "the bandwidth between stages"), []))


def _seconds(transport: Transport, source: int, payload: Tensor, ready: Tensor) -> float:
    """Time from the moment in which this stage is ready until it has a tensor like ``payload``."""
    began = perf_counter()
    receipt = transport.receive(TensorSpec.of(payload), source, BANDWIDTH)
    transport.send(ready, TensorSpec.of(ready), source, BANDWIDTH)
    receipt.wait()
    wait_for_all(payload.device)  # a device may still be waiting for what the host has already got
    seconds = perf_counter() - began
    transport.confirm(source, BANDWIDTH)
    return seconds


def render_paths(paths: Sequence[MeasuredPath]) -> str:
    """Paths of tensors between stages, with their bandwidth, in a sentence."""
    parts = []
    for name in sorted({path.name for path in paths}, reverse=True):
        those = [path for path in paths if path.name == name]
        rates = [path.bytes_per_second / 1e9 for path in those]
        rate = f"{min(rates):.1f}" if len(those) == 1 else f"{min(rates):.1f} to {max(rates):.1f}"
        where = "" if len(those) == len(paths) else " from rank " + ", ".join(f"{a} to {b}" for a, b, *_ in those)
        parts.append(f"{name}{where} ({rate} GB/s)")
    lines = [f"Large tensors travel between stages by {' and by '.join(parts)}, measured with 4 MiB."]
    reasons: dict[str, list[str]] = {}
    for path in paths:
        for reason in path.declined:
            reasons.setdefault(reason, []).append(f"{path.source} to {path.target}")
    lines += [f"Not by {reason} (ranks {', '.join(where)})." for reason, where in reasons.items()]
    return "\n".join(lines)
