"""Mesh shape: the map between global ranks, axes, nodes and shard groups, as plain numbers.

The world is a product of axes, ``pp x dp_replicate x dp_shard x tp``. A placement strategy is a string of three
letters, D (data), P (pipeline), T (tensor); the right-most letter varies fastest over the global rank, as in
SageMaker's library. ``cluster`` is ``DPT``: the ranks of one pipeline are neighbours. For 8 ranks with pp = 2::

    cluster (DPT)   pipelines [0 1] [2 3] [4 5] [6 7]   replicas [0 2 4 6] [1 3 5 7]
    spread  (TPD)   pipelines [0 4] [1 5] [2 6] [3 7]   replicas [0 1 2 3] [4 5 6 7]

Stages run against the rank order: **the last stage sits on the lowest rank** of its pipeline, so that the loss, the
loggers and the progress bar are on global rank 0 with real values.

The data axis is two, ``dp_replicate`` outside and ``dp_shard`` (S) inside: neighbours on it are a *shard group*, whose
ranks hold a part of each parameter and gather the rest from each other. That is most of the traffic, and links between
nodes are slow. So ``cluster`` moves S inside P (``DPST``) if shard groups touch fewer nodes then: activations, which
stages send each other, are small. T stays innermost, since its messages are the largest. ``spread`` has S inside
already, and letters that the user has chosen are kept. A shard group that spans nodes is a grid of nodes and ranks, so
that it can gather in two hops (:meth:`MeshShape.hops`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from smp_strategy.config.degree_check import check_degree

__all__ = ["MeshShape"]

_AXES = {"D": "dp_replicate", "S": "dp_shard", "P": "pp", "T": "tp"}
# The usual order first.
_NAMED_PLACEMENTS = {"cluster": ("DSPT", "DPST"), "spread": ("TPDS",)}


@final
@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Degrees of the axes, rank order and nodes, without any process group."""

    pp: int
    """Pipeline stages."""
    dp: int
    """Data-parallel replicas, sharded or not: each reads samples of its own."""
    dp_shard: int = 1
    """Replicas in a shard group."""
    tp: int = 1
    """Ranks over which a layer is split."""
    placement: str = "cluster"
    """``cluster``, ``spread``, a permutation of D, P, T, or one of D, S, P, T with S behind D."""
    node_size: int | None = None
    """Ranks on each node; ``None``: all ranks are on one."""

    def __post_init__(self) -> None:
        assert self.dp % self.dp_shard == 0
        assert self.world_size % (self.node_size or 1) == 0
        assert self.order.index("D") < self.order.index("S"), "replicas are numbered in the order of their ranks"

    @classmethod
    def of_world(
        cls,
        world_size: int,
        *,
        pp: int,
        dp_shard: int = 1,
        tp: int = 1,
        placement: str = "cluster",
        node_size: int | None = None,
    ) -> "MeshShape":
        """Fill a world with replicas of ``pp`` stages of ``tp`` ranks each.

        Raises:
            ConfigError: the degrees do not divide the world.
        """
        check_degree(pp, world_size, dp_shard=dp_shard, tp=tp)
        dp = world_size // (pp * tp)
        return cls(pp=pp, dp=dp, dp_shard=dp_shard, tp=tp, placement=placement, node_size=node_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def num_nodes(self) -> int:
        return self.world_size // (self.node_size or self.world_size)

    @property
    def degrees(self) -> dict[str, int]:
        return {"dp_replicate": self.dp // self.dp_shard, "dp_shard": self.dp_shard, "pp": self.pp, "tp": self.tp}

    @cached_property
    def order(self) -> str:
        """Axes as letters (S: ``dp_shard``), slowest first."""
        orders = _NAMED_PLACEMENTS.get(self.placement)
        if orders is None:
            return self.placement if "S" in self.placement else self.placement.replace("D", "DS")
        return min(orders, key=lambda order: replace(self, placement=order).nodes_of_shard_group)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return tuple(_AXES[letter] for letter in self.order)

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Distance of neighbours on an axis, in global ranks."""
        strides, stride = {}, 1
        for axis in reversed(self.axes):
            strides[axis] = stride
            stride *= self.degrees[axis]
        return strides

    def reader_of(self, rank: int, *, is_joint: bool) -> tuple[int, int]:
        """Number of readers of samples, and the one whose samples ``rank`` gets: a replica, or, if samples are not
        joint, each of the ranks in it that split layers."""
        here = self.coordinates(rank)
        replica = here["dp_replicate"] * self.dp_shard + here["dp_shard"]
        return (self.dp, replica) if is_joint else (self.dp * self.tp, replica * self.tp + here["tp"])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank, by axis."""
        return {axis: rank // self._strides[axis] % degree for axis, degree in self.degrees.items()}

    def rank_of(self, coordinates: dict[str, int]) -> int:
        """Global rank at the given coordinates (default 0); the inverse of :meth:`coordinates`."""
        return sum(self._strides[axis] * coordinate for axis, coordinate in coordinates.items())

    def rank_at(self, replica: int, stage: int, part: int = 0) -> int:
        """Global rank of a stage of a replica that has the given part of split layers."""
        replicate, shard = divmod(replica, self.dp_shard)
        return self.rank_of({"dp_replicate": replicate, "dp_shard": shard, "pp": self.pp - 1 - stage, "tp": part})

    def group(self, rank: int, *axes: str) -> list[int]:
        """Global ranks along ``axes`` through ``rank``, in the order of their coordinates, the last axis fastest."""
        here = self.coordinates(rank)
        places = itertools.product(*(range(self.degrees[axis]) for axis in axes))
        return [self.rank_of({**here, **dict(zip(axes, place, strict=True))}) for place in places]

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along ``axes``; each rank is in one."""
        firsts = [rank for rank in range(self.world_size) if not any(self.coordinates(rank)[axis] for axis in axes)]
        return [self.group(rank, *axes) for rank in firsts]

    def node_of(self, rank: int) -> int:
        """Node of a global rank: ranks of a node are neighbours."""
        return rank // (self.node_size or self.world_size)

    @cached_property
    def nodes_of_shard_group(self) -> int:
        """Largest number of nodes that a shard group touches."""
        return self._most_nodes("dp_shard")

    @cached_property
    def nodes_of_tensor_group(self) -> int:
        """Largest number of nodes that a tensor-parallel group touches."""
        return self._most_nodes("tp")

    def _most_nodes(self, axis: str) -> int:
        degree, stride = self.degrees[axis], self._strides[axis]
        if stride >= (self.node_size or self.world_size):
            return degree
        # No node lies between neighbours of a group.
        firsts = (rank for rank in range(self.world_size) if rank // stride % degree == 0)
        return max(self.node_of(first + (degree - 1) * stride) - self.node_of(first) + 1 for first in firsts)

    def hops(self, rank: int) -> tuple[list[int], list[int]]:
        """Two hops that reach the shard group of ``rank`` so that no byte crosses twice to the same node.

        Returns:
            The ranks of the group on the node of ``rank``, and those at the same position on each node. A hop along
            the second and one along the first reach the group. If nodes hold different numbers of its ranks there is
            no such grid: ``rank`` alone, and the whole group.
        """
        group = self.group(rank, "dp_shard")
        # Ranks along one axis ascend, so those of a node stand together.
        nodes = [list(ranks) for _, ranks in itertools.groupby(group, self.node_of)]
        if len({len(ranks) for ranks in nodes}) > 1:
            return [rank], group
        inner = next(ranks for ranks in nodes if rank in ranks)
        return inner, [ranks[inner.index(rank)] for ranks in nodes]

    def ranks_per_node(self, rank: int, *axes: str) -> int | None:
        """Number of ranks on each node of the group along ``axes`` through ``rank``.

        Returns:
            ``None`` if there is no hierarchy: the group is on one node, has one rank on each node, or has different
            numbers of ranks on them.
        """
        sizes = self._sizes_on_nodes(self.group(rank, *axes))
        return sizes[0] if len(sizes) > 1 and len(set(sizes)) == 1 and sizes[0] > 1 else None

    def are_on_one_node(self, rank: int, *axes: str) -> bool:
        """Whether all ranks of the group along ``axes`` through ``rank`` are on one node."""
        return len(self._sizes_on_nodes(self.group(rank, *axes))) == 1

    @property
    def has_uneven_replicas(self) -> bool:
        """Whether the ranks that sum their gradients are not equally many on each node that they touch."""
        axes = ("dp_replicate",) if self.dp_shard > 1 else ("dp_replicate", "dp_shard")
        return any(len(set(self._sizes_on_nodes(group))) > 1 for group in self.groups(*axes))

    def _sizes_on_nodes(self, group: Sequence[int]) -> list[int]:
        # Ranks along data axes ascend, so those of a node stand together.
        return [len(list(ranks)) for _, ranks in itertools.groupby(group, self.node_of)]

    def __str__(self) -> str:
        """Number of ranks, and the degrees of the axes."""
        shards = f"dp_replicate {self.dp // self.dp_shard} x dp_shard {self.dp_shard}"
        degrees = f"pp {self.pp} x {shards if self.dp_shard > 1 else f'dp {self.dp}'}"
        degrees += f" x tp {self.tp}" if self.tp > 1 else ""
        return f"{self.world_size} ranks{f' on {self.num_nodes} nodes' * (self.num_nodes > 1)} = {degrees}"

    def draw(self) -> str:
        """Table of global ranks: one row per replica, one column per stage.

        With several nodes a rank is preceded by its node; with sharding there is a gap between shard groups. Ranks
        that split layers between them stand together: ``0+1``.
        """
        order = self.order if self.dp_shard > 1 else self.order.replace("S", "")
        table = [self._row(replica) for replica in range(self.dp)]
        head = ["shard"] * (self.dp_shard > 1) + [f"stage {stage}" for stage in range(self.pp)]
        width = max(len(cell) for row in (head, *table) for cell in row)
        lines = [f"Process mesh: {self}, placement {order}"]
        lines.append(f"{'node:rank' if self.num_nodes > 1 else '':11}" + "  ".join(f"{cell:>{width}}" for cell in head))
        for replica, row in enumerate(table):
            if self.dp_shard > 1 and replica and replica % self.dp_shard == 0:
                lines.append("")
            lines.append(f"replica {replica:<3}" + "  ".join(f"{cell:>{width}}" for cell in row))
        return "\n".join(lines + self.notes())

    def _row(self, replica: int) -> list[str]:
        cells = []
        for stage in range(self.pp):
            ranks = [self.rank_at(replica, stage, part) for part in range(self.tp)]
            cells.append(
                "+".join(f"{self.node_of(rank)}:{rank}" if self.num_nodes > 1 else str(rank) for rank in ranks)
            )
        return [str(replica % self.dp_shard), *cells] if self.dp_shard > 1 else cells

    def notes(self) -> list[str]:
        """Notes about groups that span more nodes than necessary."""
        clustered, found = replace(self, placement="cluster"), []
        for what, size, here, least in (
            ("Shard groups", self.dp_shard, self.nodes_of_shard_group, clustered.nodes_of_shard_group),
            ("Tensor-parallel groups", self.tp, self.nodes_of_tensor_group, clustered.nodes_of_tensor_group),
        ):
            if here > 1:
                remedy = f" `placement_strategy=cluster` would make that {least}." if least < here else ""
                found.append(f"{what} of {size} span {here} nodes of {self.node_size} ranks.{remedy}")
        return found
