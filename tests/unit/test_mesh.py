"""Rank placement against SageMaker's published tables."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.errors import ConfigError
from smp_strategy.mesh import MeshShape, ProcessMesh
from smp_strategy.testing import run_ranks

placements = st.sampled_from(["cluster", "spread", *map("".join, itertools.permutations("DPT"))])


def groups(shape: MeshShape, letter: str) -> list[list[int]]:
    return sorted({tuple(shape.group(letter, rank)) for rank in range(shape.world_size)})


def test_cluster_keeps_the_ranks_of_a_pipeline_together():
    shape = MeshShape(pp=2, dp=4, placement="cluster")
    assert groups(shape, "P") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups(shape, "D") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_spread_keeps_the_replicas_of_a_stage_together():
    shape = MeshShape(pp=2, dp=4, placement="spread")
    assert groups(shape, "P") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups(shape, "D") == [(0, 1, 2, 3), (4, 5, 6, 7)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), placements)
def test_coordinates_and_ranks_are_inverse(pp, dp, tp, placement):
    shape = MeshShape(pp=pp, dp=dp, tp=tp, placement=placement)
    assert [shape.rank_of(shape.coordinates(rank)) for rank in range(shape.world_size)] == [*range(shape.world_size)]


def test_a_degree_that_does_not_divide_the_world_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"must divide the number of ranks \(6\), but is 4.*1, 2, 3, 6"):
        MeshShape.of_world(6, pp=4)


def test_the_drawing_puts_the_last_stage_on_rank_zero():
    assert MeshShape(pp=2, dp=2).draw().splitlines()[1:] == [
        "           stage 0  stage 1",
        "replica 0        1        0",
        "replica 1        3        2",
    ]


def run_places() -> tuple[int, int, tuple[int, ...], bool]:
    mesh = ProcessMesh(MeshShape.of_world(4, pp=2))
    return mesh.stage, mesh.dp_rank, mesh.stage_ranks, mesh.is_first_of_replica


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
