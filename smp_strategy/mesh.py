"""Which rank stands where: global ranks and the axes of the process mesh.

The world is a product of axes, ``pp x dp_replicate x dp_shard x tp`` (dp_shard and tp are 1 until they are built).
A placement strategy is a string of three letters, D (data), P (pipeline), T (tensor); the right-most letter varies
fastest over the global rank, as in SageMaker's library. ``cluster`` is ``DPT``: the ranks of one pipeline are
neighbours. For 8 ranks with pp = 2::

    cluster (DPT)   pipelines [0 1] [2 3] [4 5] [6 7]   replicas [0 2 4 6] [1 3 5 7]
    spread  (TPD)   pipelines [0 4] [1 5] [2 6] [3 7]   replicas [0 1 2 3] [4 5 6 7]

Stages run against the rank order: **the last stage sits on the lowest rank** of its pipeline, so that the loss, the
loggers and the progress bar are on global rank 0 with real values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp_strategy.errors import ConfigError

__all__ = ["MeshShape", "ProcessMesh", "check_degree"]

_NAMED_PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}


def check_degree(pp: int, world_size: int, units: Sequence[str] | None = None) -> None:
    """Refuse a number of stages that does not fit the ranks or, where they are known, the units of the model.

    Raises:
        ConfigError: with all reasons.
    """
    problems = []
    if world_size % pp:
        fits = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
        problems.append(
            f"`pipeline_parallel_degree` must divide the number of ranks ({world_size}), but is {pp}. "
            f"Degrees that fit: {', '.join(map(str, fits))}."
        )
    if units is not None and pp > len(units):
        problems.append(
            f"`pipeline_parallel_degree` is {pp}, but the model can be cut into {len(units)} units only "
            f"({', '.join(units) or 'none'}). Choose a degree that is not larger."
        )
    if problems:
        raise ConfigError(problems)


@final
@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The degrees of the axes and the rank order, without any process group."""

    pp: int
    """Pipeline stages."""
    dp: int
    """Data-parallel replicas."""
    tp: int = 1
    """Ranks over which a layer is split."""
    placement: str = "cluster"
    """``cluster``, ``spread`` or a permutation of D, P, T."""

    @classmethod
    def of_world(cls, world_size: int, *, pp: int, placement: str = "cluster") -> "MeshShape":
        """Fill a world that ``pp`` divides with replicas of ``pp`` stages."""
        check_degree(pp, world_size)
        return cls(pp=pp, dp=world_size // pp, placement=placement)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def order(self) -> str:
        """The axes as letters, slowest first."""
        return _NAMED_PLACEMENTS.get(self.placement, self.placement)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank, by letter (``D``, ``P``, ``T``)."""
        found = {}
        for letter in reversed(self.order):
            rank, found[letter] = divmod(rank, self._degree(letter))
        return found

    def rank_of(self, coordinates: dict[str, int]) -> int:
        """Global rank at the given coordinates; the inverse of :meth:`coordinates`."""
        rank = 0
        for letter in self.order:
            rank = rank * self._degree(letter) + coordinates[letter]
        return rank

    def group(self, letter: str, rank: int) -> list[int]:
        """Global ranks along the axis ``letter`` through ``rank``, in the order of their coordinate."""
        here = self.coordinates(rank)
        return [self.rank_of({**here, letter: index}) for index in range(self._degree(letter))]

    def _degree(self, letter: str) -> int:
        return {"D": self.dp, "P": self.pp, "T": self.tp}[letter]

    def draw(self) -> str:
        """A table of global ranks: one row per replica, one column per stage."""
        width = max(len(f"stage {self.pp - 1}"), len(str(self.world_size - 1)))
        head = f"{'':11}" + "  ".join(f"{f'stage {stage}':>{width}}" for stage in range(self.pp))
        rows = [f"Process mesh: {self.world_size} ranks = pp {self.pp} x dp {self.dp}, placement {self.order}", head]
        for replica in range(self.dp):
            ranks = [self.rank_of({"D": replica, "P": self.pp - 1 - stage, "T": 0}) for stage in range(self.pp)]
            rows.append(f"replica {replica:<3}" + "  ".join(f"{rank:>{width}}" for rank in ranks))
        return "\n".join(rows)


@final
class ProcessMesh:
    """This rank's place in the mesh and its process groups.

    The default process group must exist; construction is collective.

    Args:
        shape: degrees and rank order.
        device_type: where the ranks compute.
        timeout: of the groups' collectives; ``None``: the backend's.

    Attributes:
        shape: degrees and rank order.
        rank: global rank of this process.
        pp_rank, dp_rank: coordinates on the axes.
        stage: the pipeline stage that this rank owns (``pp - 1 - pp_rank``).
        pp_group, dp_group: process groups through this rank.
        stage_ranks: global rank of each stage of this replica.
    """

    def __init__(self, shape: MeshShape, *, device_type: str = "cpu", timeout: timedelta | None = None) -> None:
        if shape.world_size != dist.get_world_size():
            raise ConfigError(
                f"The mesh has {shape.world_size} ranks (pp {shape.pp} x dp {shape.dp} x tp {shape.tp}), "
                f"but {dist.get_world_size()} processes run. Start as many processes as the mesh has ranks."
            )
        self.shape = shape
        self.rank = dist.get_rank()
        names = {"D": "dp_replicate", "P": "pp", "T": "tp"}
        degrees = [shape._degree(letter) for letter in shape.order]
        self.device_mesh = DeviceMesh(
            device_type,
            torch.arange(math.prod(degrees)).reshape(degrees),
            mesh_dim_names=tuple(names[letter] for letter in shape.order),
        )
        here = shape.coordinates(self.rank)
        self.pp_rank, self.dp_rank = here["P"], here["D"]
        self.pp_group = self.device_mesh.get_group("pp")
        self.dp_group = self.device_mesh.get_group("dp_replicate")
        if timeout is not None:
            # DeviceMesh gives its groups the backend's default, not that of the default group.
            for group in (self.pp_group, self.dp_group):
                dist.distributed_c10d._set_pg_timeout(timeout, group)
        self.stage = shape.pp - 1 - self.pp_rank
        self.stage_ranks = tuple(reversed(shape.group("P", self.rank)))
        self._timeout = timeout
        self._groups = {frozenset(range(shape.pp)): self.pp_group}

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return self.shape.pp

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.shape.dp

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this is the rank of its replica that holds the last stage, the loss and the loggers."""
        return self.pp_rank == 0

    @property
    def first_of_replica(self) -> int:
        """Global rank that holds the last stage of this replica."""
        return self.stage_ranks[-1]

    def group_of(self, stages: frozenset[int]) -> dist.ProcessGroup:
        """The group of some stages of this replica, this rank's among them; the first call is collective for them."""
        if stages not in self._groups:
            ranks = [self.stage_ranks[stage] for stage in sorted(stages)]
            self._groups[stages] = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        return self._groups[stages]

    def close(self) -> None:
        """Let go of the process groups; the mesh is of no use afterwards."""
        del self.device_mesh, self.pp_group, self.dp_group
        self._groups.clear()

    def draw(self) -> str:
        """See :meth:`MeshShape.draw`."""
        return self.shape.draw()
