"""Rank placement against SageMaker's tables, shard groups against DeepSpeed's, and what holds for any mesh."""

import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smp_strategy.config.degree_check import check_degree
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.errors import ConfigError

PERMUTATIONS = ["".join(letters) for letters in itertools.permutations("DPT")]
DATA = ("dp_replicate", "dp_shard")


@st.composite
def shapes(draw, placements=("cluster", "spread", *PERMUTATIONS)) -> MeshShape:
    pp, replicas, dp_shard, tp = (draw(st.integers(1, most)) for most in (4, 3, 4, 2))
    world_size = pp * replicas * dp_shard * tp
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return MeshShape(
        pp=pp,
        dp=replicas * dp_shard,
        dp_shard=dp_shard,
        tp=tp,
        placement=draw(st.sampled_from(placements)),
        node_size=draw(st.sampled_from([None, *sizes])),
    )


def nodes_of(shape: MeshShape, group: list[int]) -> set[int]:
    return {shape.node_of(rank) for rank in group}


# Rank order


def test_cluster_keeps_the_ranks_of_a_pipeline_together():
    shape = MeshShape(pp=2, dp=4, placement="cluster")
    assert shape.groups("pp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.groups(*DATA) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_spread_keeps_the_replicas_of_a_stage_together():
    shape = MeshShape(pp=2, dp=4, placement="spread")
    assert shape.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups(*DATA) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_figure_of_the_developer_guide_is_the_order_dtp():
    shape = MeshShape(pp=2, dp=2, tp=2, placement="DTP")
    assert shape.groups("pp")[0] == [0, 1]
    assert shape.groups("tp")[0] == [0, 2]


@pytest.mark.parametrize("placement", PERMUTATIONS)
def test_the_right_most_letter_varies_fastest(placement):
    degrees = {"P": 2, "D": 6, "T": 5}
    shape = MeshShape(pp=2, dp=6, tp=5, dp_shard=3, placement=placement)
    slow, middle, fast = placement
    for p, d, t in itertools.product(range(2), range(6), range(5)):
        place = {"P": p, "D": d, "T": t}
        rank = (place[slow] * degrees[middle] + place[middle]) * degrees[fast] + place[fast]
        assert shape.coordinates(rank) == {"pp": p, "dp_replicate": d // 3, "dp_shard": d % 3, "tp": t}


@given(shapes())
def test_coordinates_and_ranks_are_inverse(shape):
    assert [shape.rank_of(shape.coordinates(rank)) for rank in range(shape.world_size)] == [*range(shape.world_size)]


@given(shapes(), st.sampled_from([("pp",), ("tp",), ("dp_shard",), ("dp_replicate",), DATA]))
def test_the_groups_along_an_axis_share_out_the_world(shape, axes):
    groups = shape.groups(*axes)
    assert sorted(itertools.chain(*groups)) == [*range(shape.world_size)]
    assert all(shape.group(rank, *axes) == group for group in groups for rank in group)
    # Torch numbers the ranks of a group in ascending order: so do the coordinates.
    assert all(group == sorted(group) for group in groups)


# Shard groups


def test_shard_groups_are_those_of_sagemaker_beside_tensor_parallelism():
    shape = MeshShape(pp=1, dp=8, tp=4, dp_shard=4)
    assert shape.group(0, *DATA) == [0, 4, 8, 12, 16, 20, 24, 28]
    assert shape.group(0, "dp_shard") == [0, 4, 8, 12]
    assert shape.group(16, "dp_shard") == [16, 20, 24, 28]
    assert shape.group(4, "dp_replicate") == [4, 20]


@given(shapes())
def test_the_most_nodes_of_a_group_are_counted(shape):
    assert shape.nodes_of_shard_group == max(len(nodes_of(shape, group)) for group in shape.groups("dp_shard"))
    assert shape.nodes_of_tensor_group == max(len(nodes_of(shape, group)) for group in shape.groups("tp"))


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["cluster", "spread", "DPT"]))
def test_without_other_axes_shard_groups_are_rows_and_replicas_columns(replicas, dp_shard, placement):
    shape = MeshShape(pp=1, dp=replicas * dp_shard, dp_shard=dp_shard, placement=placement)
    rows = [[row * dp_shard + column for column in range(dp_shard)] for row in range(replicas)]
    assert shape.groups("dp_shard") == rows
    assert shape.groups("dp_replicate") == [list(column) for column in zip(*rows, strict=True)]


@given(shapes(["cluster", "spread"]))
def test_shard_groups_of_a_named_placement_are_inside_a_node_where_they_fit_beside_tensor_parallelism(shape):
    assume(shape.node_size is not None)
    beside = shape.tp if shape.placement == "cluster" else 1
    assume(shape.node_size % (shape.dp_shard * beside) == 0)
    assert shape.nodes_of_shard_group == 1
    assert all(len(nodes_of(shape, group)) == 1 for group in shape.groups("dp_shard"))


@given(shapes(["cluster"]))
def test_cluster_touches_as_few_nodes_as_its_two_orders_can_and_is_the_usual_one_if_equal(shape):
    def touched(order: str) -> int:
        degrees = {"pp": shape.pp, "dp": shape.dp, "dp_shard": shape.dp_shard, "tp": shape.tp}
        as_given = MeshShape(**degrees, placement=order, node_size=shape.node_size)
        return max(len(nodes_of(as_given, group)) for group in as_given.groups("dp_shard"))

    usual, inside = touched("DSPT"), touched("DPST")
    assert shape.order == ("DPST" if inside < usual else "DSPT")


@given(shapes(["cluster"]))
def test_cluster_is_the_usual_order_without_sharding_whatever_the_nodes(shape):
    unsharded = MeshShape(pp=shape.pp, dp=shape.dp, tp=shape.tp, node_size=shape.node_size)
    assert unsharded.groups("pp") == MeshShape(pp=shape.pp, dp=shape.dp, tp=shape.tp, placement="DPT").groups("pp")


def test_an_order_by_letters_is_kept_although_shard_groups_span_nodes():
    shape = MeshShape(pp=2, dp=2, dp_shard=2, placement="DPT", node_size=2)
    assert shape.groups("dp_shard") == [[0, 2], [1, 3]]
    assert shape.nodes_of_shard_group == 2
    assert MeshShape(pp=2, dp=2, dp_shard=2, node_size=2).groups("dp_shard") == [[0, 1], [2, 3]]


# Two hops


def test_the_hops_of_a_group_over_two_nodes_are_those_of_deepspeed():
    shape = MeshShape(pp=1, dp=16, dp_shard=8, node_size=4)
    assert shape.hops(0) == ([0, 1, 2, 3], [0, 4])
    assert shape.hops(14) == ([12, 13, 14, 15], [10, 14])


@given(shapes())
def test_two_hops_reach_the_whole_shard_group(shape):
    for rank in range(shape.world_size):
        inner, outer = shape.hops(rank)
        group = shape.group(rank, "dp_shard")
        assert rank in inner
        assert rank in outer
        assert len(nodes_of(shape, inner)) == 1
        assert sorted(far for near in outer for far in shape.hops(near)[0]) == group
        assert sorted(far for near in inner for far in shape.hops(near)[1]) == group
        # The part of rank (i, j) of the grid is number i * (ranks on a node) + j of the group.
        assert [group[outer.index(rank) * len(inner) + position] for position in range(len(inner))] == inner
        counts = [len([far for far in group if shape.node_of(far) == node]) for node in nodes_of(shape, group)]
        assert len(outer) == (len(counts) if len(set(counts)) == 1 else len(group))


def test_a_group_with_three_ranks_on_one_node_and_one_on_the_next_is_reached_in_one_hop():
    shape = MeshShape(pp=1, dp=12, dp_shard=4, node_size=3)
    assert shape.hops(1) == ([1], [0, 1, 2, 3])
    assert shape.hops(5) == ([4, 5], [5, 7])


# Refusals


def test_a_degree_that_does_not_divide_the_world_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"must divide the number of ranks \(6\), but is 4.*1, 2, 3, 6"):
        MeshShape.of_world(6, pp=4)


def test_a_shard_degree_that_does_not_divide_the_replicas_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"divide the number of replicas \(4: 8 ranks, 2 .* is 3.*: 1, 2, 4\."):
        MeshShape.of_world(8, pp=2, dp_shard=3)


def test_a_tensor_degree_that_does_not_divide_the_world_or_leaves_too_few_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"`tensor_parallel_degree` must divide .* \(6\), but is 4.*1, 2, 3, 6"):
        MeshShape.of_world(6, pp=1, tp=4)
    with pytest.raises(ConfigError, match=r"ranks \(8: 4 for each of 2 .*\), but is 8. Degrees that fit: 1, 2, 4\."):
        MeshShape.of_world(8, pp=8, tp=2)
    with pytest.raises(ConfigError, match=r"replicas \(2: 8 ranks, 4 for each .* is 4.*: 1, 2\."):
        MeshShape.of_world(8, pp=2, tp=2, dp_shard=4)


def test_degrees_that_fit_neither_units_nor_replicas_are_refused_with_both_reasons():
    with pytest.raises(ConfigError) as error:
        check_degree(4, 8, ["embed", "head"], dp_shard=4)
    assert len(error.value.problems) == 2


def test_a_model_without_units_has_one_stage():
    check_degree(1, 2, [])
    with pytest.raises(ConfigError, match=r"degree` is 2, .* cut into 0 units only \(none\)"):
        check_degree(2, 2, [])


# Drawing


def test_ranks_that_split_layers_stand_together_in_the_drawing():
    assert MeshShape.of_world(8, pp=2, tp=2).draw().splitlines() == [
        "Process mesh: 8 ranks = pp 2 x dp 2 x tp 2, placement DPT",
        "           stage 0  stage 1",
        "replica 0      2+3      0+1",
        "replica 1      6+7      4+5",
    ]


def test_the_drawing_says_that_ranks_that_split_layers_are_on_several_nodes():
    last = MeshShape.of_world(4, pp=1, tp=2, placement="spread", node_size=2).draw().splitlines()[-1]
    assert last == (
        "Tensor-parallel groups of 2 span 2 nodes of 2 ranks. `placement_strategy=cluster` would make that 1."
    )


def test_the_drawing_puts_the_last_stage_on_rank_zero():
    assert MeshShape(pp=2, dp=2).draw().splitlines() == [
        "Process mesh: 4 ranks = pp 2 x dp 2, placement DPT",
        "           stage 0  stage 1",
        "replica 0        1        0",
        "replica 1        3        2",
    ]


@given(shapes())
def test_the_drawing_of_one_node_without_sharding_knows_neither(shape):
    unsharded = MeshShape(pp=shape.pp, dp=shape.dp, tp=shape.tp, placement=shape.placement)
    one_node = MeshShape(
        pp=shape.pp, dp=shape.dp, tp=shape.tp, placement=shape.placement, node_size=unsharded.world_size
    )
    assert one_node.draw() == unsharded.draw()
    assert not {"node", "shard", ":"} & set(unsharded.draw().partition(":")[2].split())
    assert len(unsharded.draw().splitlines()) == 2 + shape.dp


def test_the_drawing_names_the_node_of_each_rank_and_parts_shard_groups():
    drawing = MeshShape(pp=2, dp=4, dp_shard=2, placement="spread", node_size=4).draw()
    assert f"```\n{drawing}\n```" in (Path(__file__).parents[3] / "docs" / "placement.md").read_text()
    assert drawing.splitlines() == [
        "Process mesh: 8 ranks on 2 nodes = pp 2 x dp_replicate 2 x dp_shard 2, placement TPDS",
        "node:rank    shard  stage 0  stage 1",
        "replica 0        0      1:4      0:0",
        "replica 1        1      1:5      0:1",
        "",
        "replica 2        0      1:6      0:2",
        "replica 3        1      1:7      0:3",
    ]


def test_the_drawing_says_that_shard_groups_span_nodes_and_what_to_do():
    last = MeshShape(pp=2, dp=2, dp_shard=2, placement="DPT", node_size=2).draw().splitlines()[-1]
    assert last == "Shard groups of 2 span 2 nodes of 2 ranks. `placement_strategy=cluster` would make that 1."
    last = MeshShape(pp=1, dp=4, dp_shard=4, node_size=2).draw().splitlines()[-1]
    assert last == "Shard groups of 4 span 2 nodes of 2 ranks."


# Hierarchy of the replicas


@pytest.mark.parametrize(
    ("degrees", "node_size", "found"),
    [
        ({"pp": 1, "dp": 4}, 2, [2, 2, 2, 2]),
        ({"pp": 1, "dp": 4}, None, [None] * 4),
        ({"pp": 1, "dp": 4}, 4, [None] * 4),
        ({"pp": 1, "dp": 4}, 1, [None] * 4),
        ({"pp": 2, "dp": 2}, 2, [None] * 4),  # a pipeline on each node
        ({"pp": 2, "dp": 4}, 4, [2] * 8),
        ({"pp": 2, "dp": 3}, 3, [None] * 6),
    ],
)
def test_replicas_have_a_hierarchy_if_nodes_have_several_of_them_each(degrees, node_size, found):
    shape = MeshShape(**degrees, node_size=node_size)
    per_node = [shape.ranks_per_node(rank, "dp_replicate", "dp_shard") for rank in range(shape.world_size)]
    assert per_node == found
    assert shape.has_uneven_replicas == (degrees == {"pp": 2, "dp": 3})


def test_the_ranks_with_the_same_shard_have_one_over_the_rest_of_their_nodes():
    shape = MeshShape(pp=1, dp=8, dp_shard=2, node_size=4)
    assert shape.ranks_per_node(0, "dp_replicate") == 2
    assert not shape.has_uneven_replicas
