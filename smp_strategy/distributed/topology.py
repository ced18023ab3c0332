"""Node topology: the number of ranks on each node.

Links inside a node are fast, those between nodes are not, so shard groups should stay inside. The launcher numbers the
ranks node by node and tells each process how many there are on its node (``LOCAL_WORLD_SIZE``). If it does not, the
names of the hosts tell: ranks with the same name are on one node. The ranks exchange this, so that all of them draw the
same conclusion.
"""

import itertools
import os
import socket
from collections.abc import Hashable, Sequence

import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.errors import ConfigError

__all__ = ["even_node_size", "find_node_size", "find_ranks_per_node", "ranks_per_node"]


def find_node_size(needed_by: str | None) -> int | None:
    """Number of ranks on each node; collective over all ranks.

    Args:
        needed_by: Option, with its value, that depends on nodes; ``None``: nothing does, and they may be uneven.

    Returns:
        ``None`` if nodes are uneven.

    Raises:
        ConfigError: nodes are uneven, and ``needed_by`` depends on them.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), socket.gethostname()
    known = collectives.gather_objects(here, "a comparison of nodes")
    size = even_node_size(known)
    if size is None and needed_by is not None:
        told = ", ".join(f"rank {rank}: {host}, {size or 'unknown'}" for rank, (size, host) in enumerate(known))
        raise ConfigError(
            f"`{needed_by}` needs as many ranks on each node as on every other, numbered "
            f"node by node, but they are uneven (host and LOCAL_WORLD_SIZE of {told}). Start equal numbers of "
            "processes, or leave the option out."
        )
    return size


def even_node_size(known: Sequence[tuple[int, str]]) -> int | None:
    """Number of ranks on each node.

    Args:
        known: For each rank the number of ranks on its node (0: unknown), and the name of its host.

    Returns:
        ``None`` if nodes have different numbers, or ranks of a node are no neighbours.
    """
    told, hosts = {size for size, _ in known}, [host for _, host in known]
    if told == {0}:
        runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
        if len({host for host, _ in runs}) < len(runs):
            return None
        told = {size for _, size in runs}
    size = min(told)
    return size if len(told) == 1 and len(known) % size == 0 else None


def find_ranks_per_node(group: dist.ProcessGroup) -> int | None:
    """Number of ranks of ``group`` on each node; collective over it. ``None`` as for :func:`ranks_per_node`."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    node = dist.get_rank() // size if size else socket.gethostname()
    return ranks_per_node(collectives.gather_objects(node, "a comparison of nodes", group))


def ranks_per_node(nodes: Sequence[Hashable]) -> int | None:
    """Number of ranks on each node.

    Returns:
        ``None`` if nodes have different numbers, or ranks of a node are no neighbours.
    """
    runs = [(node, len(list(ranks))) for node, ranks in itertools.groupby(nodes)]
    is_even = len({size for _, size in runs}) == 1 and len({node for node, _ in runs}) == len(runs)
    return runs[0][1] if is_even else None
