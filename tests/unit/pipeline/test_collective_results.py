"""What is done without anybody is what is done where all bring the same."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.pipeline.dist_calls.collective_results import AS_IF_ALIKE, ReplicaNumber
from smp_strategy.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

RANKS = 2


def tensor(*size):
    return torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)


def calls():
    """Of each function that every rank may call alike, the arguments."""
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
    yield "all_gather", {"tensor_list": [tensor(3) * 0, tensor(3) * 0], "tensor": tensor(3)}
    yield "all_gather_into_tensor", {"output_tensor": torch.zeros(4, 2), "input_tensor": tensor(2, 2)}
    yield "all_gather_object", {"object_list": [None, None], "obj": {"a": 1}}
    yield from (("all_reduce", {"tensor": tensor(3), "op": op}) for op in ops)
    yield "reduce", {"tensor": tensor(3), "dst": 0}
    yield "broadcast", {"tensor": tensor(3), "src": 1}
    yield "reduce_scatter", {"output": torch.zeros(2), "input_list": [tensor(2), 3 * tensor(2)]}
    yield "reduce_scatter_tensor", {"output": torch.zeros(2, 3), "input": tensor(4, 3)}
    yield "all_to_all_single", {"output": torch.zeros(4, 2), "input": tensor(4, 2)}
    yield "all_to_all", {"output_tensor_list": [tensor(2) * 0, tensor(2) * 0], "input_tensor_list": [tensor(2)] * 2}


def done_by_both():
    found = []
    for (name, really), (_, alone) in zip(calls(), calls(), strict=True):
        getattr(dist, name)(**really)
        AS_IF_ALIKE[name](alone, ReplicaNumber(dist.get_rank(), RANKS))
        if name != "reduce" or dist.get_rank() == 0:  # elsewhere the backend leaves what it likes
            keys = [key for key in really if key != "op"]
            found.append((name, [really[key] for key in keys], [alone[key] for key in keys]))
    return found


def test_collectives_of_ranks_that_bring_the_same():
    for rank in run_ranks(done_by_both, RANKS):
        for name, really, alone in rank:
            if name == "all_gather_object":
                assert really == alone
            else:
                torch.testing.assert_close(really, alone, msg=name)


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_a_single_rank_keeps_what_it_brings(size, rows, data):
    rank = data.draw(st.integers(0, size - 1))
    mine = torch.randn(rows, 3)
    gathered, reduced = torch.zeros(size * rows, 3), mine.clone()
    AS_IF_ALIKE["all_gather_into_tensor"]({"output_tensor": gathered, "input_tensor": mine}, ReplicaNumber(rank, size))
    AS_IF_ALIKE["all_reduce"]({"tensor": reduced}, ReplicaNumber(rank, size))
    assert torch.equal(gathered, mine.repeat(size, 1))
    assert torch.equal(reduced, mine * size)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_sizes_that_only_others_know_keep_their_places(name):
    places = [torch.ones(2), torch.ones(3)]
    given = {"tensor_list": places, "tensor": tensor(2)}
    if name == "all_to_all":
        given = {"output_tensor_list": places, "input_tensor_list": [tensor(2), tensor(1)]}
    AS_IF_ALIKE[name](given, ReplicaNumber(0, 2))
    assert [each.tolist() for each in places] == [[1.0, 2.0], [0.0, 0.0, 0.0]]
