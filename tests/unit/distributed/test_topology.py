"""Which ranks are on one node, as launchers and host names say."""

import os

import pytest
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.topology import even_node_size, find_node_size
from smp_strategy.engine.degrees import choose_shape
from smp_strategy.testing import run_ranks


@pytest.mark.parametrize(
    ("known", "size"),
    [
        ([(2, "a")] * 4, 2),  # network namespaces: two nodes of one name
        ([(4, "a")] * 4, 4),
        ([(1, "a"), (1, "b")], 1),
        ([(0, "a"), (0, "a"), (0, "b"), (0, "b")], 2),
        ([(0, "a")] * 3, 3),
        ([(0, "a"), (0, "b"), (0, "a"), (0, "b")], None),  # no neighbours
        ([(0, "a"), (0, "a"), (0, "b")], None),
        ([(2, "a"), (2, "a"), (1, "b")], None),
        ([(2, "a"), (2, "a"), (0, "b"), (0, "b")], None),  # half of them have a launcher
        ([(8, "a")] * 4, None),  # left over from another start
    ],
)
def test_nodes_are_even_or_unknown(known, size):
    assert even_node_size(known) == size


def run_find(sizes: list[str | None], needed_by: str | None) -> int | None:
    size = sizes[int(os.environ["RANK"])]
    if size is None:
        del os.environ["LOCAL_WORLD_SIZE"]
    else:
        os.environ["LOCAL_WORLD_SIZE"] = size
    return find_node_size(needed_by)


@pytest.mark.parametrize(("sizes", "found"), [(["1", "1"], 1), ([None, None], 2), (["1", "2"], None)])
def test_all_ranks_find_the_same_nodes(sizes, found):
    assert run_ranks(run_find, 2, sizes, None) == [found] * 2


def test_uneven_nodes_are_refused_where_shard_groups_are_laid_over_them():
    with pytest.raises(RuntimeError, match=r"degree=2` needs as many ranks on each node .*rank 1: .*, unknown"):
        run_ranks(run_find, 2, ["1", None], "sharded_data_parallel_degree=2")


def run_shape(pp: int | None, dp_shard: int, shards_state: bool = False) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    config = SMPConfig(
        pipeline_parallel_degree=pp, sharded_data_parallel_degree=dp_shard, shard_optimizer_state=shards_state
    )
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return choose_shape(config, module, lambda text: None).draw()


def test_the_mesh_of_a_run_knows_the_nodes():
    assert "4 ranks on 2 nodes = pp 2 x dp 2, placement DPT\n" in run_ranks(run_shape, 4, 2, 1)[0]
    assert "dp_replicate 1 x dp_shard 2, placement DPST\n" in run_ranks(run_shape, 4, 2, 2)[0]


@pytest.mark.parametrize(("dp_shard", "shards_state", "pp"), [(1, False, 4), (2, False, 1), (1, True, 1)])
def test_ranks_become_stages_unless_something_is_sharded_over_replicas(dp_shard, shards_state, pp):
    assert f"= pp {pp} x" in run_ranks(run_shape, 4, None, dp_shard, shards_state)[0]


@pytest.mark.parametrize("pp", [None, 1])
def test_a_shard_degree_that_does_not_fit_the_replicas_is_refused(pp):
    with pytest.raises(RuntimeError, match=r"`sharded_data_parallel_degree` must divide .* is 3"):
        run_ranks(run_shape, 4, pp, 3)


def run_hierarchical(sizes: list[str], pp: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = sizes[int(os.environ["RANK"])]
    config = SMPConfig(pipeline_parallel_degree=pp, ddp_reduction="hierarchical")
    choose_shape(config, nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), lambda text: None)


def test_a_hierarchy_over_uneven_nodes_is_refused_only_if_it_was_asked_for():
    with pytest.raises(RuntimeError, match="`ddp_reduction=hierarchical` needs as many ranks on each node"):
        run_ranks(run_hierarchical, 3, ["2", "2", "1"], 1)
    with pytest.raises(RuntimeError, match="as many replicas of a stage on each node as on every other"):
        run_ranks(run_hierarchical, 6, ["3"] * 6, 2)
    run_ranks(run_hierarchical, 4, ["2"] * 4, 2)
    run_ranks(run_hierarchical, 2, ["2"] * 2, 1)
