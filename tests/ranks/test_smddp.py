"""SageMaker's data parallel library: its calls, and a script of its documentation."""

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import parallel

import smp_strategy.smddp as dist
from smp_strategy import UnsupportedError
from smp_strategy.testing import run_ranks

# Arguments of version 1.3, with their defaults.
CONTRACT = {
    "is_available": {},
    "is_initialized": {},
    "get_world_size": {"group": None},
    "get_rank": {"group": None},
    "get_local_rank": {},
    "all_reduce": {"tensor": ..., "op": dist.ReduceOp.SUM, "group": None, "async_op": False},
    "broadcast": {"tensor": ..., "src": 0, "group": None, "async_op": False},
    "all_gather": {"tensor_list": ..., "tensor": ..., "group": None, "async_op": False},
    "all_to_all_single": {
        **{"output_t": ..., "input_t": ..., "output_split_sizes": None, "input_split_sizes": None},
        **{"group": None, "async_op": False},
    },
    "barrier": {"group": None, "async_op": False},
    "DistributedDataParallel": {
        **{"module": ..., "device_ids": None, "output_device": None, "broadcast_buffers": True},
        **{"process_group": None, "bucket_cap_mb": 25, "options": ...},
    },
}


@pytest.mark.parametrize("name", CONTRACT)
def test_names_arguments_and_defaults_are_those_of_the_library(name):
    given = inspect.signature(getattr(dist, name)).parameters
    found = {key: ... if each.default is inspect.Parameter.empty else each.default for key, each in given.items()}
    assert found == CONTRACT[name]


def calls(is_async: bool) -> dict[str, Any]:
    dist.init_process_group("smddp")  # there is a group already
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"ranks": (rank, size, dist.get_local_rank(), dist.is_initialized())}

    def wait(work: Any) -> None:
        assert (work is not None) == is_async
        if work is not None:
            work.wait()

    for op in (*dist.ReduceOp, torch.distributed.ReduceOp.MAX):
        tensor = torch.tensor([1.0, 2.0]) * (rank + 1)
        wait(dist.all_reduce(tensor, op, async_op=is_async))
        found[op.name] = tensor.tolist()
    tensor = torch.tensor([float(rank)])
    wait(dist.broadcast(tensor, 1, async_op=is_async))
    found["broadcast"] = tensor.item()
    parts = [torch.zeros(1) for _ in range(size)]
    wait(dist.all_gather(parts, torch.tensor([float(rank)]), async_op=is_async))
    found["all_gather"] = torch.cat(parts).tolist()
    out = torch.zeros(size)
    wait(dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank, async_op=is_async))
    found["all_to_all"] = out.tolist()
    wait(dist.barrier(async_op=is_async))
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_do_what_they_say(is_async):
    for rank, found in enumerate(run_ranks(calls, 2, is_async, timeout=60)):
        assert found == {
            "ranks": (rank, 2, rank, True),
            **{"SUM": [3.0, 6.0], "AVERAGE": [1.5, 3.0], "MIN": [1.0, 2.0], "MAX": [2.0, 4.0]},
            **{"broadcast": 1.0, "all_gather": [0.0, 1.0], "all_to_all": [float(rank), 10.0 + rank]},
        }


def refused() -> list[str]:
    found = []
    for call in (
        lambda: dist.init_process_group("mpi"),
        lambda: dist.init_process_group(init_method="env://"),
        lambda: dist.all_reduce(torch.ones(1), torch.distributed.ReduceOp.PRODUCT),
    ):
        try:
            call()
        except UnsupportedError as error:
            found.append(str(error))
    return found


def test_what_the_library_does_not_have_is_refused():
    backend, options, op = run_ranks(refused, 1)[0]
    assert backend.startswith("`backend` must be one of smddp, gloo, nccl, but is 'mpi'")
    assert options.startswith("`init_process_group` got `init_method`")
    assert op.startswith("`op` must be one of SUM, AVERAGE, MIN, MAX")


def train(wraps: bool, per_node: str) -> tuple[list[Tensor], int | None]:
    """As its documentation has it: DistributedDataParallel, a scaled learning rate, accumulation under `no_sync`."""
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 1))
    # Without the argument in PyTorch's, which warns of a new name; only running statistics depend on it.
    ours, theirs = dist.DistributedDataParallel, parallel.DistributedDataParallel
    wrapped: Any = ours(model, broadcast_buffers=False) if wraps else theirs(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size(), momentum=0.9)
    for step in range(3):
        torch.manual_seed(step * 4 + dist.get_rank())
        with wrapped.no_sync():
            wrapped(torch.randn(4, 6)).square().mean().backward()
        wrapped(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()], wrapped.sums.ranks_per_node if wraps else None


def test_weights_over_two_nodes_are_those_of_pytorchs_wrapper():
    expected = run_ranks(train, 4, False, "2", timeout=90)[0][0]
    everyones = run_ranks(train, 4, True, "2", timeout=90)
    for weights, per_node in everyones:
        assert per_node == 2
        assert all(map(torch.equal, weights, everyones[0][0]))
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_on_one_node_they_have_the_same_bits():
    expected = run_ranks(train, 2, False, "2", timeout=90)[0][0]
    for weights, per_node in run_ranks(train, 2, True, "2", timeout=90):
        assert per_node is None
        assert all(map(torch.equal, weights, expected))


LATER = """
import sys
import torch, torch.distributed as dist
import smp_strategy.smddp
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(backend="smddp")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((1, 3), dist.get_rank() + 1.0)).backward()
# One write: the ranks share the pipe.
sys.stdout.write(f"{dist.get_backend()} {model.module.weight.grad.tolist()}\\n")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.dear
def test_scripts_of_later_versions_name_it_as_a_backend(tmp_path):
    (tmp_path / "script.py").write_text(LATER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["smddp [[1.5, 1.5, 1.5]]"] * 2, done.stderr
