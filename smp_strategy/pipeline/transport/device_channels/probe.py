"""Trial of channels between accelerators: patterns are sent in both directions and compared.

Whether two processes can use a path depends on devices, drivers, containers and limits, and some fail by wrong data.
So each end posts patterns that its device is still computing, the headers are gathered, and the other end compares
what it gets. A channel counts if both directions have delivered every pattern. All that may block happens in a thread
with a deadline.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.background_call import BackgroundCall
from smp_strategy.distributed.host_copies import OnHost
from smp_strategy.distributed.torch_modes import ThreadModes
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Channel
from smp_strategy.pipeline.transport.device_channels.device_channel import DeviceChannel

__all__ = ["PATTERN_BYTES", "PROBE_SECONDS", "give_up", "probe"]

PROBE_SECONDS: Final = 60.0
"""Longest wait for one step of a trial: the first message may load libraries and connect machines."""
PATTERN_BYTES: Final = 1 << 20
ROUNDS: Final = 3
"""The later ones use memory again."""
_ADDITIONS: Final = 50
_FAREWELL_SECONDS: Final = 5.0
_DOING: Final = "a trial of the paths between stages"

T = TypeVar("T")


def probe(opened: Mapping[int, DeviceChannel | str], group: dist.ProcessGroup, device: torch.device) -> dict[int, str]:
    """Try a channel to each of some ranks. Collective over ``group``.

    Args:
        opened: channel by the global rank of the other end, or the reason why there is none.

    Returns:
        Reason by global rank of the other end, the same for both ends; those without a reason can be used.
    """
    here = dist.get_rank()
    failed = _agreed({peer: each for peer, each in opened.items() if isinstance(each, str)}, group)
    for turn in range(ROUNDS):
        channels = {
            peer: each for peer, each in opened.items() if peer not in failed and isinstance(each, DeviceChannel)
        }
        attempts = {
            peer: _attempt(partial(_posted, channel, _pattern(here, peer, turn), device), device)
            for peer, channel in channels.items()
        }
        own = {peer: each for peer, each in attempts.items() if isinstance(each, bytes)}
        found = {peer: each for peer, each in attempts.items() if isinstance(each, str)}
        told = dict(collectives.gather_objects((here, own), _DOING, group))
        for peer, channel in channels.items():
            if peer in own and here in told[peer]:
                arrives = partial(_arrives, channel, told[peer][here], _pattern(peer, here, turn), device)
                same = _attempt(arrives, device)
                if same is not True:
                    found[peer] = same or "the data that arrived was wrong"
        failed |= _agreed(found, group)
    return failed


def give_up(channel: DeviceChannel) -> None:
    """Free what belongs to a channel that has failed, as far as that is possible within some seconds."""
    BackgroundCall(channel.release).within(_FAREWELL_SECONDS)


def _agreed(reasons: Mapping[int, str], group: dist.ProcessGroup) -> dict[int, str]:
    """Reasons of this rank and of the other ends, by the other end."""
    here = dist.get_rank()
    told = collectives.gather_objects((here, dict(reasons)), _DOING, group)
    pairs: dict[frozenset[int], str] = {}
    for one, reasons_of_one in sorted(told):
        for other, reason in reasons_of_one.items():
            pairs.setdefault(frozenset((one, other)), reason)
    return {peer: reason for pair, reason in pairs.items() if here in pair for peer in pair - {here}}


def _attempt(call: Callable[[], T], device: torch.device) -> T | str:
    """Result of ``call``, or the reason why it has none."""
    modes = ThreadModes(device)

    def run() -> T:
        with modes.apply():
            return call()

    attempt = BackgroundCall(run)
    if not attempt.within(PROBE_SECONDS):
        return f"no answer within {PROBE_SECONDS:.0f} s"
    try:
        return attempt.get()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"


def _pattern(source: int, target: int, turn: int) -> Tensor:
    seed = torch.Generator(device="cpu").manual_seed((source * 4099 + target) * ROUNDS + turn)
    return torch.randint(0, 256, (PATTERN_BYTES,), dtype=torch.uint8, generator=seed, device="cpu")


def _posted(channel: Channel, pattern: Tensor, device: torch.device) -> bytes:
    """Header of ``pattern``, which the device is still computing when the channel gets it."""
    late = (pattern - _ADDITIONS).to(device)
    for _ in range(_ADDITIONS):
        late += 1
    header = channel.post(late, TensorSpec.of(late))
    late.zero_()  # which must not arrive
    return (header.wait() if isinstance(header, OnHost) else header).numpy().tobytes()


def _arrives(channel: Channel, told: bytes, expected: Tensor, device: torch.device) -> bool:
    spec = TensorSpec.of(torch.empty(PATTERN_BYTES, dtype=torch.uint8, device=device))
    header = channel.header(spec)
    header.memory[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    return torch.equal(header.take().use().cpu(), expected)
