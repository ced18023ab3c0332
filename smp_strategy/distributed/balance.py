"""Load balancing: items of different sizes are dealt out so that the largest share is small (greedy, LPT)."""

import heapq
from collections.abc import Sequence

__all__ = ["balanced", "balanced_among"]


def balanced(sizes: Sequence[int], num_shares: int) -> list[int]:
    """Deal out items so that the shares are about equally large: the largest first, each to the smallest share.

    The largest share is at most 4/3 of the smallest possible one (Graham 1969).

    Returns:
        The share of each item.
    """
    shares = [0] * len(sizes)
    totals = [(0, share) for share in range(num_shares)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        total, share = totals[0]
        shares[item] = share
        heapq.heapreplace(totals, (total + sizes[item], share))
    return shares


def balanced_among(sizes: Sequence[int], choices: Sequence[Sequence[int]], num_shares: int) -> list[int]:
    """Deal out items that only some shares can have, so that the shares are about equally large.

    Args:
        sizes: Sizes of the items.
        choices: Shares that can have each item; at least one.
        num_shares: Number of shares.

    Returns:
        The share of each item.
    """
    shares, totals = [0] * len(sizes), [0] * num_shares
    # Items without a choice come first: the others fill up beside them.
    for item in sorted(range(len(sizes)), key=lambda item: (len(choices[item]) > 1, -sizes[item], item)):
        shares[item] = min(choices[item], key=lambda share: (totals[share], share))
        totals[shares[item]] += sizes[item]
    return shares
