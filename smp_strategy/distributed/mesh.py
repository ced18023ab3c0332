"""Process mesh: this rank's coordinates, and the process groups through it.

:mod:`smp_strategy.distributed.mesh_shape` maps ranks to places. All ranks take part in making each group: torch names a
group that only its members make after the number of groups that each of them has, and they deadlock if those numbers
differ. No group is the default one, on which ranks also exchange objects: the two must never mix.

An axis with one rank gets a group only on demand: each group of gloo has a thread that wakes up a hundred times per
second, on a core that computes.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Final, TypeVar, final

import torch
import torch.distributed as dist

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.deadlock import watch_of
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.distributed.process_groups import new_group, new_subgroup
from smp_strategy.distributed.torch_private import default_group
from smp_strategy.errors import ConfigError

__all__ = ["STAGE_CONNECTIONS", "ProcessMesh"]

T = TypeVar("T")

STAGE_CONNECTIONS: Final = 4
"""Number of connections between two stages of which some are on different nodes."""


@final
class ProcessMesh:
    """This rank's place in the mesh and its process groups.

    The default process group must exist and carry host tensors; construction is collective.

    Args:
        shape: Degrees and rank order.
        device_type: Type of the devices that the ranks compute on.
        timeout: Timeout of the groups' collectives; ``None``: the backend's.

    Attributes:
        shape: Degrees and rank order.
        device_type: Type of the devices that the ranks compute on.
        rank: Global rank of this process.
        pp_rank, dp_rank: Coordinates on the pipeline and among all replicas.
        replicate_rank, shard_rank: ``dp_rank`` as coordinates on its two axes.
        stage: Pipeline stage of this rank (``pp - 1 - pp_rank``).
        shard_group: Ranks that hold a parameter together; ``None``: nothing is sharded.
        tp_rank: Coordinate in the tensor-parallel group. All groups except ``tp_group`` and ``replica_group`` are of
            ranks with the same one.
        tp_group: Ranks that split layers between them; ``None``: no layers are split.
        stage_ranks: Global rank of each stage of this replica, for the ranks with the same ``tp_rank``.
    """

    def __init__(self, shape: MeshShape, *, device_type: str = "cpu", timeout: timedelta | None = None) -> None:
        if shape.world_size != dist.get_world_size():
            raise ConfigError(
                f"The mesh has {shape.world_size} ranks (pp {shape.pp} x dp {shape.dp} x tp {shape.tp}), "
                f"but {dist.get_world_size()} processes run. Start as many processes as the mesh has ranks."
            )
        self.shape = shape
        self.device_type = device_type
        self.rank = dist.get_rank()
        self._timeout = timeout
        if timeout is not None:
            watch_of().timeout = timeout
        here = shape.coordinates(self.rank)
        self.pp_rank, self.replicate_rank, self.shard_rank = here["pp"], here["dp_replicate"], here["dp_shard"]
        self.tp_rank = here["tp"]
        self.dp_rank = self.replicate_rank * shape.dp_shard + self.shard_rank
        self._along = {axis: self._mine(shape.groups(axis)) for axis in shape.axes if shape.degrees[axis] > 1}
        self.shard_group, self.tp_group = self._along.get("dp_shard"), self._along.get("tp")
        # A group of its own even if it has the same ranks: messages here must not queue up behind parameters.
        is_sharded, is_split = self.shard_group is not None, self.tp_group is not None
        self._all_replicas = self._mine(shape.groups("dp_replicate", "dp_shard")) if is_sharded else None
        self._all_parts = self._mine(shape.groups("pp", "tp")) if is_split else None
        has_sums = shape.dp > 1 and not is_sharded
        self._sums = self._mine(shape.groups("dp_replicate", "dp_shard")) if has_sums else None
        self.stage = shape.pp - 1 - self.pp_rank
        self.stage_ranks = tuple(reversed(shape.group(self.rank, "pp")))
        self._saving_groups: dict[str, dist.ProcessGroup] = {}
        self._groups: dict[frozenset[int], dist.ProcessGroup | None] = {}
        self._more_stage_groups: list[dist.ProcessGroup] = []

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Stages of this replica; a rank in it is ``pp_rank``."""
        return self._along.get("pp") or self._alone

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """Ranks with the same shard of the same parameters."""
        return self._along.get("dp_replicate") or self._alone

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """All replicas; a rank in it is ``dp_rank``. ``replicate_group`` if nothing is sharded."""
        return self._all_replicas or self.replicate_group

    @property
    def sum_group(self) -> dist.ProcessGroup:
        """All replicas, for the sums of gradients only.

        gloo would take a reduction that only some ranks make for one of the sums.
        """
        return self._sums or self.dp_group

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """All ranks that read the same samples; ``pp_group`` if no layers are split."""
        return self._all_parts or self.pp_group

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        if self.shape.world_size == 1:
            return default_group()
        return new_group([self.rank], timeout=self._timeout, among_members=True)

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return self.shape.pp

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.shape.dp

    @property
    def tp(self) -> int:
        """Number of ranks over which layers are split."""
        return self.shape.tp

    @property
    def spreads_model(self) -> bool:
        """Whether no rank has the whole module in steps: it has stages, shards or split layers."""
        return self.pp > 1 or self.shard_group is not None or self.tp > 1

    @property
    def first_of_replica(self) -> int:
        """Global rank of the last stage of this replica, the first of those that split its layers."""
        return self.shape.rank_at(self.dp_rank, self.pp - 1)

    def group_of(self, stages: frozenset[int]) -> dist.ProcessGroup | None:
        """Group of some stages of this replica, ``None`` if this rank is not in it; collective over all ranks."""
        if len(stages) == self.shape.pp:
            return self.pp_group
        if stages not in self._groups:
            last = self.shape.pp - 1
            groups = [[ranks[last - stage] for stage in stages] for ranks in self.shape.groups("pp")]
            self._groups[stages] = new_subgroup(groups, self._timeout)
        return self._groups[stages]

    def more_stage_groups(self) -> Sequence[dist.ProcessGroup]:
        """Groups of the same ranks as ``pp_group``, for the pieces of large messages. Collective over all ranks.

        There are none if every replica has its stages on one node.
        """
        stages = self.shape.groups("pp")
        if not self._more_stage_groups and not all(self.shape.are_on_one_node(each[0], "pp") for each in stages):
            self._more_stage_groups = [self._mine(stages, "gloo") for _ in range(STAGE_CONNECTIONS - 1)]
        return self._more_stage_groups

    def saving_group(self, use: str = "background") -> dist.ProcessGroup:
        """Group of all ranks on the host, for writing files; collective at the first call for a ``use``.

        A writer in the background needs a group that nobody else uses.
        """
        if use not in self._saving_groups:
            self._saving_groups[use] = new_group(backend="gloo", timeout=self._timeout)
        return self._saving_groups[use]

    # Values along an axis

    def told_by_stage(self, value: T, stage: int, doing: str) -> T:
        """The ``value`` that ``stage`` has, on all stages of this replica. Collective over them."""
        return collectives.tell(value, self.stage_ranks[stage], doing, self.pp_group)

    def first_sample(self, own: int) -> int:
        """Index of this rank's first sample in those of ``tp_group``, of which it has ``own``. Collective over it."""
        return sum(collectives.gather_numbers(own, "how many samples ranks have", self.tp_group)[: self.tp_rank])

    def extremes(self, number: int, doing: str) -> tuple[int, int]:
        """Least and largest ``number`` of all replicas. Collective over them."""
        both = torch.tensor([number, -number], dtype=torch.int32, device="cpu")
        collectives.reduce_numbers(both, dist.ReduceOp.MAX, group=self.dp_group, doing=doing).wait()
        return -int(both[1]), int(both[0])

    def _mine(self, groups: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Make ``groups`` that cover all ranks; the one that this rank is in. Collective over all ranks."""
        mine = new_subgroup(groups, self._timeout, backend)
        assert mine is not None
        return mine

    def close(self) -> None:
        """Drop the process groups; the mesh cannot be used afterwards."""
        for name in ("shard_group", "tp_group", "_all_replicas", "_all_parts", "_sums", "_alone"):
            self.__dict__.pop(name, None)  # it may be closed already
        self._along.clear()
        self._groups.clear()
        self._more_stage_groups.clear()
        self._saving_groups.clear()

    def draw(self) -> str:
        """Table of global ranks; see :meth:`MeshShape.draw`."""
        return self.shape.draw()
