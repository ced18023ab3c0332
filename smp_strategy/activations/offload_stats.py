"""What activations have been offloaded in a step, in numbers."""

from dataclasses import dataclass
from typing import final

__all__ = ["OffloadStats"]


@final
@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """What has gone between the device and the host in a step."""

    bytes_out: int = 0
    bytes_in: int = 0
    most_on_host: int = 0
    """Bytes that waited on the host at once, at most."""
    num_late: int = 0
    """Times that something was read before it was expected: the computation has waited for its copy."""
    num_held_up: int = 0
    """Times that the computation had to wait for a copy to the host, if it was not done, to get memory back."""
