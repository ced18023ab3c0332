"""Process groups hold the ranks that the shape of the mesh says."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.testing import run_ranks


def run_places() -> tuple[int, int, tuple[int, ...], bool]:
    mesh = ProcessMesh(MeshShape.of_world(4, pp=2))
    return mesh.stage, mesh.dp_rank, mesh.stage_ranks, mesh.rank == mesh.first_of_replica


def test_every_rank_finds_its_place():
    assert run_ranks(run_places, 4) == [
        (1, 0, (1, 0), True),
        (0, 0, (1, 0), False),
        (1, 1, (3, 2), True),
        (0, 1, (3, 2), False),
    ]


def run_wrong_world() -> None:
    ProcessMesh(MeshShape(pp=3, dp=1))


def test_a_mesh_that_is_larger_than_the_world_is_refused():
    with pytest.raises(RuntimeError, match="The mesh has 3 ranks .* but 2 processes run"):
        run_ranks(run_wrong_world, 2)


def members(group: dist.ProcessGroup) -> list[int]:
    """What the ranks of a group tell each other, in the order of the group."""
    told = [-1] * dist.get_world_size(group)
    dist.all_gather_object(told, dist.get_rank(), group=group)
    return told


def run_groups(shape: MeshShape) -> None:
    mesh = ProcessMesh(shape)
    assert shape.rank_at(mesh.dp_rank, mesh.stage, mesh.tp_rank) == mesh.rank
    expected = {name: shape.group(mesh.rank, name) for name in ("pp", "dp_shard", "dp_replicate")}
    assert members(mesh.pp_group) == expected["pp"]
    assert members(mesh.replicate_group) == expected["dp_replicate"]
    assert members(mesh.dp_group) == shape.group(mesh.rank, "dp_replicate", "dp_shard")
    assert members(mesh.dp_group).index(mesh.rank) == mesh.dp_rank
    assert expected["dp_shard"].index(mesh.rank) == mesh.shard_rank
    assert expected["dp_replicate"].index(mesh.rank) == mesh.replicate_rank
    if mesh.shard_group is not None:
        assert members(mesh.shard_group) == expected["dp_shard"]
    assert (mesh.shard_group is None) == (shape.dp_shard == 1)
    if mesh.tp_group is not None:
        assert members(mesh.tp_group) == shape.group(mesh.rank, "tp")
        assert members(mesh.tp_group).index(mesh.rank) == mesh.tp_rank
    assert (mesh.tp_group is None) == (shape.tp == 1)
    everyone = shape.group(mesh.rank, "pp", "tp")
    assert members(mesh.replica_group) == sorted(everyone)
    assert mesh.first_of_replica == min(everyone)
    mesh.close()


@pytest.mark.parametrize("placement", ["cluster", "spread", "DPT"])
@pytest.mark.parametrize(("pp", "dp_shard"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_groups_of_four_ranks_on_two_nodes_hold_the_ranks_of_the_shape(pp, dp_shard, placement):
    run_ranks(run_groups, 4, MeshShape.of_world(4, pp=pp, dp_shard=dp_shard, placement=placement, node_size=2))


@pytest.mark.parametrize("placement", ["cluster", "spread", "TDP"])
@pytest.mark.parametrize(("pp", "dp_shard"), [(1, 1), (2, 1), (1, 2)])
def test_groups_of_four_ranks_that_split_layers_hold_the_ranks_of_the_shape(pp, dp_shard, placement):
    run_ranks(run_groups, 4, MeshShape.of_world(4, pp=pp, dp_shard=dp_shard, tp=2, placement=placement))


def run_count() -> list[int]:
    """How many groups this rank is in: by default, then with each mesh."""
    counts = [len(dist.distributed_c10d._world.pg_names)]
    for dp_shard in (1, 2):
        mesh = ProcessMesh(MeshShape.of_world(4, pp=1, dp_shard=dp_shard, node_size=1), timeout=timedelta(seconds=7))
        counts.append(len(dist.distributed_c10d._world.pg_names))
        if dp_shard == 1:
            assert mesh.dp_group is mesh.replicate_group
    for group in (mesh.shard_group, mesh.replicate_group, mesh.dp_group):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    return counts


def test_sharding_makes_its_groups_only_where_something_is_sharded():
    counts = run_ranks(run_count, 4)[0]
    made = [after - before for before, after in itertools.pairwise(counts)]
    # Replicas are all ranks, and have two groups beside the default one. Then two axes, and all replicas.
    assert made == [2, 3]


def run_chain() -> None:
    mesh = ProcessMesh(MeshShape.of_world(6, pp=3))
    for stages in (frozenset({0, 1}), frozenset({1, 2}), frozenset({0, 2}), frozenset({0, 1, 2})):
        group = mesh.group_of(stages)
        assert (group is None) == (mesh.stage not in stages)
        if group is not None:
            assert members(group) == sorted(mesh.stage_ranks[stage] for stage in stages)


def test_a_stage_may_share_parameters_with_one_and_others_with_another():
    run_ranks(run_chain, 6)
