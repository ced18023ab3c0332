"""Message tags: every range of tags of this package in one place.

gloo matches the messages of a pair of ranks within a process group by tag alone, and a tag has 31 bits that can be
used. A receive whose tag some other message has takes that message, whatever it is about. So what shares a group must
have ranges of its own::

    groups of flat buffers       [0, 2^30)             collectives of flat buffers (messages), in turn
    groups of stages             [0, 2^30)             moves and gradients: microbatch, move, direction
                                 [2^30, 3 * 2^29)      moves in hooks, counted within a hook
                                 [3 * 2^29, + 2^20)    results that stages share, in turn
                          [13 * 2^27, + 2^20)   announcements of messages that NCCL carries, in turn
    every group                  [7 * 2^28, 2^31 - 16] reduced numbers: a digest, the lowest four bits 0
                                 2^31 - 7 .. 2^31 - 1  single purposes, below
"""

from typing import Final

__all__ = [
    "ANNOUNCEMENTS",
    "BANDWIDTH",
    "CLOCKS",
    "HOOKS",
    "MAIN_PROCESS",
    "NEVER_SENT",
    "NUMBERS",
    "NUM_ANNOUNCEMENTS",
    "NUM_FLAT_BUFFERS",
    "NUM_SHARED_RESULTS",
    "SHARED_RESULTS",
    "TEXTS",
    "reduced_numbers",
]

NUM_FLAT_BUFFERS: Final = 1 << 30
"""Tags of collectives of flat buffers, from 0 on. When they begin again, the messages that had them are long over."""
HOOKS: Final = 1 << 30
"""First tag of moves between stages in hooks. Those of microbatches stay below: 2 * 32768 tags a microbatch."""
SHARED_RESULTS: Final = 3 << 29
"""First tag of results that stages share at the end of a step."""
NUM_SHARED_RESULTS: Final = 1 << 20
"""Number of those tags; then they begin again."""
ANNOUNCEMENTS: Final = 13 << 27
"""First tag of announcements of messages that NCCL carries."""
NUM_ANNOUNCEMENTS: Final = 1 << 20
"""Number of those tags; then they begin again."""

NEVER_SENT: Final = (1 << 31) - 1
"""No message has this tag, so a receive with it times out: gloo's only way to break off a group's waits."""
NUMBERS: Final = (1 << 31) - 2
"""Digest, count and size at the start of an exchange."""
TEXTS: Final = (1 << 31) - 3
"""Descriptions of where ranks are, once they turned out to be in different calls."""
CLOCKS: Final = (1 << 31) - 5
"""Times that stages ask each other for."""
BANDWIDTH: Final = (1 << 31) - 6
"""Tensors by which stages measure their bandwidth."""
MAIN_PROCESS: Final = (1 << 31) - 7
"""Where the main process goes on, and calls of it in which others take part."""

_REDUCED: Final = 7 << 28
_REDUCED_BITS: Final = (1 << 28) - 16


def reduced_numbers(digest: int) -> int:
    """Tag of numbers that ranks reduce by messages; ``digest`` says what they are.

    So numbers of two different reductions never meet (unless their digests collide). They never meet one of the single
    tags either, which have some of the lowest four bits set.
    """
    return _REDUCED | (digest & _REDUCED_BITS)
