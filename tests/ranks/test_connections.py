"""Large messages between nodes travel in pieces on several connections: the same tensors, and peers that are killed."""

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.mesh import STAGE_CONNECTIONS
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport import connections
from smp_strategy.pipeline.transport.connections import Connections
from smp_strategy.pipeline.transport.open_channels import measure_paths, render_paths
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.testing import run_ranks
from tests.parity.test_pipeline import assert_same, one_process, run_pipeline
from tests.ranks.test_transport import TENSORS

MIB = 1 << 20


def connected() -> Transport:
    groups = [dist.new_group(backend="gloo") for _ in range(STAGE_CONNECTIONS - 1)]
    return Transport([0, 1], dist.group.WORLD, more_groups=groups)


def all_tensors(is_predicted: bool, least: int) -> list[Tensor]:
    connections.LEAST_PIECE_BYTES = least
    transport = connected()
    specs = [TensorSpec.of(tensor if is_predicted else tensor.contiguous()) for tensor in TENSORS.values()]
    if transport.rank == 0:
        for tag, (tensor, spec) in enumerate(zip(TENSORS.values(), specs, strict=True)):
            transport.send(tensor, spec, 1, tag)
        transport.flush()
        return []
    receipts = [transport.receive(spec, 0, tag) for tag, spec in enumerate(specs)]
    return [receipt.wait() for receipt in reversed(receipts)]


@pytest.mark.parametrize("least", [1, 7, 20])
@pytest.mark.parametrize("is_predicted", [True, False])
def test_tensors_arrive_with_their_own_layout(is_predicted, least):
    _, found = run_ranks(all_tensors, 2, is_predicted, least)
    for (name, expected), tensor in zip(TENSORS.items(), reversed(found), strict=True):
        assert tensor.stride() == ((3, 1) if name == "expanded" else expected.stride()), name
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def a_large_one() -> tuple[bool, Tensor | None]:
    """The tensor, and whether it was there before it was sent."""
    transport = connected()
    tensor = torch.arange(MIB, dtype=torch.float32)
    spec = TensorSpec.of(tensor)
    if transport.rank == 0:
        dist.barrier()
        transport.send(tensor, spec, 1, 0)
        tensor.zero_()  # while it is under way
        transport.flush()
        return False, None
    receipt = transport.receive(spec, 0, 0)
    was_there = receipt.arrived()
    dist.barrier()
    return was_there, receipt.wait()


def test_a_large_tensor_arrives_as_it_was():
    _, (was_there, found) = run_ranks(a_large_one, 2)
    assert not was_there
    assert torch.equal(found, torch.arange(MIB, dtype=torch.float32))


def trained(options: dict[str, Any], per_node: str) -> tuple[dict[str, Tensor], set[int]]:
    """Weights, and the numbers of connections that messages have taken."""
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    connections.LEAST_PIECE_BYTES = 16
    counts: set[int] = set()
    cut = Connections._pieces

    def noted(self: Connections, message: Tensor, known_bytes: int) -> Any:
        pieces = cut(self, message, known_bytes)
        counts.add(len(pieces))
        return pieces

    with mock.patch.object(Connections, "_pieces", noted):
        state, _ = run_pipeline("gpt2", {"stage_transport": "gloo", **options}, 8)
    return state, counts


@pytest.mark.parametrize(
    ("pp", "per_node", "options"),
    [
        (2, "1", {"microbatches": 4, "pipeline": "1f1b", "virtual_pipeline_degree": 2}),
        (4, "2", {"microbatches": 4}),
        (2, "2", {"microbatches": 4}),
    ],
    ids=["a stage on each node", "two stages on each node", "one node"],
)
def test_weights_are_those_of_one_process(pp, per_node, options):
    expected, _ = one_process("gpt2", 4, samples=8)
    ranks = run_ranks(trained, pp, {"pipeline_parallel_degree": pp, **options}, per_node)
    assert_same(expected, ranks[0][0])
    for _, counts in ranks:
        assert max(counts) == (1 if per_node == str(pp) else STAGE_CONNECTIONS)


def peer_is_killed(is_receiver: bool) -> None:
    transport = connected()
    tensor = torch.zeros(MIB)
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if is_receiver:
        transport.send(tensor, TensorSpec.of(tensor), 1, 0)
        transport.flush()
    else:
        transport.receive(TensorSpec.of(tensor), 1, 0).wait()


@pytest.mark.parametrize("is_receiver", [False, True])
def test_a_killed_peer_is_named(is_receiver):
    with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*: rank 1 failed first: .* was killed by SIGKILL"):
        run_ranks(peer_is_killed, 2, is_receiver)


def report() -> str:
    transport = connected()
    return render_paths(measure_paths(transport, torch.device("cpu")))


def test_the_report_names_them():
    assert f"travel between stages by gloo on {STAGE_CONNECTIONS} connections (" in run_ranks(report, 2)[0]
