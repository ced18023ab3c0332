"""This rank's place in the process mesh, and the process groups through it.

:mod:`smp_strategy.mesh_shape` says which rank stands where. The groups along one axis are those of torch's DeviceMesh,
which DTensors can use. The others are made by ``new_subgroups_by_enumeration``, in which all ranks take part: torch
names a group that only its members make after the number of groups that each of them has, and they wait for ever where
those numbers differ.

Every group carries tensors of the host as well, whatever the ranks compute on: messages between stages, and what ranks
tell each other.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp_strategy.errors import ConfigError
from smp_strategy.mesh_shape import MeshShape

__all__ = ["ProcessMesh"]


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
        pp_rank, dp_rank: coordinates on the pipeline and among all replicas.
        replicate_rank, shard_rank: ``dp_rank`` as coordinates on its two axes.
        stage: the pipeline stage that this rank owns (``pp - 1 - pp_rank``).
        pp_group, dp_group: process groups through this rank; a rank in them is ``pp_rank``, ``dp_rank``.
        replicate_group: the ranks with the same share of the same parameters; ``dp_group`` where nothing is sharded.
        shard_group: the ranks that hold a parameter together; ``None`` where nothing is sharded.
        tp_rank: coordinate among the ranks that split layers between them. All groups but the next two are of ranks
            with the same one.
        tp_group: the ranks that split layers between them; ``None`` where no layers are split.
        replica_group: all ranks that read the same samples; ``pp_group`` where no layers are split.
        stage_ranks: global rank of each stage of this replica, of the ranks with the same ``tp_rank``.
    """

    def __init__(self, shape: MeshShape, *, device_type: str = "cpu", timeout: timedelta | None = None) -> None:
        if shape.world_size != dist.get_world_size():
            raise ConfigError(
                f"The mesh has {shape.world_size} ranks (pp {shape.pp} x dp {shape.dp} x tp {shape.tp}), "
                f"but {dist.get_world_size()} processes run. Start as many processes as the mesh has ranks."
            )
        _refuse_without_host(device_type)
        self.shape = shape
        self.rank = dist.get_rank()
        self._timeout = timeout
        is_sharded, is_split = shape.dp_shard > 1, shape.tp > 1
        axes = tuple(axis for axis in shape.axes if axis != "dp_shard" or is_sharded)
        self.device_mesh = DeviceMesh(
            device_type,
            torch.arange(shape.world_size, device="cpu").reshape([shape.degrees[axis] for axis in axes]),
            mesh_dim_names=axes,
        )
        here = shape.coordinates(self.rank)
        self.pp_rank, self.replicate_rank, self.shard_rank = here["pp"], here["dp_replicate"], here["dp_shard"]
        self.tp_rank = here["tp"]
        self.dp_rank = self.replicate_rank * shape.dp_shard + self.shard_rank
        self.pp_group = self.device_mesh.get_group("pp")
        self.replicate_group = self.device_mesh.get_group("dp_replicate")
        self.shard_group = self.device_mesh.get_group("dp_shard") if is_sharded else None
        self.tp_group = self.device_mesh.get_group("tp") if is_split else None
        if timeout is not None:
            # DeviceMesh gives its groups the backend's default, not that of the default group.
            for group in filter(None, (self.pp_group, self.replicate_group, self.shard_group, self.tp_group)):
                dist.distributed_c10d._set_pg_timeout(timeout, group)
        # Not one of the two even if it has the same ranks: what is told here does not queue up behind parameters.
        self.dp_group = self._mine(shape.groups("dp_replicate", "dp_shard")) if is_sharded else self.replicate_group
        self.replica_group = self._mine(shape.groups("pp", "tp")) if is_split else self.pp_group
        self.stage = shape.pp - 1 - self.pp_rank
        self.stage_ranks = tuple(reversed(shape.group(self.rank, "pp")))
        self._saving_groups: dict[str, dist.ProcessGroup] = {}
        self._groups: dict[frozenset[int], dist.ProcessGroup | None] = {frozenset(range(shape.pp)): self.pp_group}

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
    def is_first_of_replica(self) -> bool:
        """Whether this is the rank of its replica that holds the last stage, the loss and the loggers."""
        return self.rank == self.first_of_replica

    @property
    def first_of_replica(self) -> int:
        """Global rank that holds the last stage of this replica, the first of those that split its layers."""
        return self.shape.rank_at(self.dp_rank, self.pp - 1)

    def group_of(self, stages: frozenset[int]) -> dist.ProcessGroup | None:
        """The group of some stages of this replica, ``None`` if this rank is not in it; collective over all ranks."""
        if stages not in self._groups:
            last = self.shape.pp - 1
            groups = [[ranks[last - stage] for stage in stages] for ranks in self.shape.groups("pp")]
            self._groups[stages] = self._made(groups)
        return self._groups[stages]

    def saving_group(self, use: str = "background") -> dist.ProcessGroup:
        """All ranks, on the host, for whoever writes files; collective at the first call for a ``use``.

        What writes in the background needs one that nobody else uses.
        """
        if use not in self._saving_groups:
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            assert group is not None
            self._saving_groups[use] = group
        return self._saving_groups[use]

    def _made(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The one of some groups that this rank is in, if it is in one; collective over all ranks."""
        mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(groups, timeout=self._timeout)[0]
        return mine

    def _mine(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The one that this rank is in, of groups that all ranks are in; collective over all ranks."""
        mine = self._made(groups)
        assert mine is not None
        return mine

    def close(self) -> None:
        """Let go of the process groups; the mesh is of no use afterwards."""
        del self.device_mesh, self.pp_group, self.dp_group, self.replicate_group, self.shard_group
        del self.tp_group, self.replica_group
        self._groups.clear()
        self._saving_groups.clear()

    def draw(self) -> str:
        """See :meth:`MeshShape.draw`."""
        return self.shape.draw()


def _refuse_without_host(device_type: str) -> None:
    """All groups are made like the default one, unless that is bound to a device: then they are split off."""
    group = dist.distributed_c10d._get_default_group()
    carried = {device.type for device in group._device_types}
    lacking = {"cpu", device_type} - carried
    if not lacking and (device_type == "cpu" or group.bound_device_id is None):
        return
    why = f"carries no tensors on {' and '.join(sorted(lacking))}" if lacking else "is bound to a device (`device_id`)"
    backends = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl"
    raise ConfigError(
        f"The default process group {why}, but ranks that compute on {device_type} send tensors of the host as well. "
        f'Make it with `init_process_group("{backends}")` and without `device_id`; for ranks that share an accelerator '
        'use "gloo" alone.'
    )
