"""Statistics of activation offload in one step."""

from dataclasses import dataclass
from typing import final

__all__ = ["OffloadStats"]


@final
@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Traffic between the device and the host in one step."""

    bytes_out: int = 0
    bytes_in: int = 0
    most_on_host: int = 0
    """Peak of bytes held on the host."""
    num_late: int = 0
    """Number of reads before the tensor was expected; computation waited for the copy."""
    num_held_up: int = 0
    """Number of times that computation had to wait for an unfinished copy to the host to get memory back."""
