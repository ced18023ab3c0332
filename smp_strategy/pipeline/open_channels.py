"""Choice of the channel between each two stages: by trying, once, when the stages are connected.

Two ranks of one machine share memory unless containers, users or the system keep them apart, which nobody can tell
beforehand. So each tries to open the memory of each other, and all ranks learn who could not.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.config.options import StageTransport
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.message_tags import BANDWIDTH
from smp_strategy.distributed.shared_arena import open_arenas
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.channel import Channel, GlooChannel
from smp_strategy.pipeline.shared_memory_channel import SharedMemoryChannel
from smp_strategy.pipeline.transport import Transport

__all__ = ["MeasuredPath", "measure_paths", "open_channels", "render_paths"]

MEASURED_BYTES: Final = 1 << 22
_ROUNDS: Final = 3


def open_channels(
    stage_ranks: Sequence[int], group: dist.ProcessGroup, chosen: StageTransport = "auto"
) -> list[Channel]:
    """Open a channel between this rank's stage and each. Collective over ``group``.

    Args:
        stage_ranks: global rank of each stage.
        group: process group of the stages.
        chosen: option ``stage_transport``.

    Raises:
        ConfigError: shared memory is asked for, and two ranks cannot share any.
    """
    gloo = GlooChannel()
    if chosen == "gloo":
        return [gloo] * len(stage_ranks)
    own, theirs, failures = open_arenas(group)
    if failures and chosen == "shared_memory":
        (one, other), reason = min(failures.items())
        raise ConfigError(
            f"`stage_transport=shared_memory` is impossible between the ranks {one} and {other}: {reason}. Use `auto`, "
            "or place the stages of a replica on one machine (`placement_strategy`)."
        )
    return [
        gloo if own is None or rank not in theirs else SharedMemoryChannel(own, theirs[rank], gloo)
        for rank in stage_ranks
    ]


class MeasuredPath(NamedTuple):
    """Path of large tensors from one rank to another."""

    source: int
    target: int
    name: str
    bytes_per_second: float


def measure_paths(transport: Transport, device: torch.device) -> list[MeasuredPath]:
    """Measure the paths from each stage to the next one. Collective over all ranks.

    Args:
        transport: transport between the stages.
        device: device of the tensors.

    Returns:
        The paths of all replicas, the same on all ranks.
    """
    stage = transport.stage_ranks.index(transport.rank)
    payload = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=device)
    ready = torch.zeros(1, dtype=torch.uint8, device="cpu")
    found: list[MeasuredPath] = []
    # A rank is at one end of one path at a time.
    for parity in (0, 1):
        if stage % 2 == parity and stage + 1 < len(transport.stage_ranks):
            for _ in range(_ROUNDS):
                transport.receive(TensorSpec.of(ready), stage + 1, BANDWIDTH).wait()
                transport.send(payload, TensorSpec.of(payload), stage + 1, BANDWIDTH)
                transport.confirm(stage + 1, BANDWIDTH)
        elif stage % 2 != parity and stage > 0:
            seconds = min(_seconds(transport, stage - 1, payload, ready) for _ in range(_ROUNDS))
            path = transport.channels[stage - 1].path_of(TensorSpec.of(payload))
            source = transport.stage_ranks[stage - 1]
            found.append(MeasuredPath(source, transport.rank, path, MEASURED_BYTES / seconds))
    transport.flush()
    return sorted(sum(collectives.gather_objects(found, "the bandwidth between stages"), []))


def _seconds(transport: Transport, source: int, payload: Tensor, ready: Tensor) -> float:
    """Time from the moment in which this stage is ready until it has a tensor like ``payload``."""
    began = perf_counter()
    receipt = transport.receive(TensorSpec.of(payload), source, BANDWIDTH)
    transport.send(ready, TensorSpec.of(ready), source, BANDWIDTH)
    receipt.wait()
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
    return f"Large tensors travel between stages by {' and by '.join(parts)}, measured with 4 MiB."
