"""Paths between accelerators, on doubles: the bits of one process, the choice between them, and ranks that end."""

import gc
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import smp_strategy.pipeline.transport.device_channels.probe as probing
from smp_strategy.distributed.host_copies import Landed
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.device_channels.nccl_channel import NcclChannel
from smp_strategy.pipeline.transport.device_channels.slot_channel import SlotChannel
from smp_strategy.pipeline.transport.device_channels.slots import SlotPool
from smp_strategy.pipeline.transport.open_channels import measure_paths, open_channels, render_paths
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.testing import run_ranks
from tests.parity.test_pipeline import assert_same, one_process, run_pipeline
from tests.ranks.path_doubles import HOST, EdgeOfGloo, IpcOfHost, new_edge, with_paths
from tests.ranks.test_transport import TENSORS

PATHS = ("cuda_ipc", "shared_memory", "nccl")
NAMES = {"cuda_ipc": "CUDA IPC", "shared_memory": "shared page-locked memory", "nccl": "NCCL", "gloo": "gloo"}
LARGE = torch.arange(1 << 18, dtype=torch.float32)  # 1 MiB
SPEC = TensorSpec.of(LARGE)


def connected(chosen: str = "auto") -> Transport:
    ranks = list(range(dist.get_world_size()))
    return Transport(ranks, dist.group.WORLD, None, open_channels(ranks, dist.group.WORLD, chosen))


# The same bits


def trained(path: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Weights, and how many tensors this rank has sent by the path."""
    with_paths(path)
    kind = NcclChannel if path == "nccl" else SlotChannel
    with mock.patch.object(kind, "post", autospec=True, side_effect=kind.post) as post:
        state, _ = run_pipeline("gpt2", {**options, "stage_transport": path}, 8)
    return state, post.call_count


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("pp", "options"),
    [
        (2, {"microbatches": 4, "pipeline": "1f1b", "virtual_pipeline_degree": 2}),
        (4, {"microbatches": 4, "pipeline": "zb-v"}),
    ],
    ids=["2 stages", "4 stages"],
)
@pytest.mark.parametrize("path", PATHS)
def test_weights_are_those_of_one_process(path, pp, options):
    expected, _ = one_process("gpt2", options["microbatches"], samples=8)
    ranks = run_ranks(trained, pp, path, {"pipeline_parallel_degree": pp, **options})
    assert_same(expected, ranks[0][0])
    assert all(count > 10 for _, count in ranks)


def all_layouts(path: str, is_predicted: bool, has_slots: bool) -> list[Tensor]:
    """All kinds of tensors from rank 0 to 1, in inference mode and outside of it."""
    with_paths(path)
    transport, found = connected(path), []
    if not has_slots:
        SlotPool.lend = lambda pool, nbytes: None
    for tag, tensor in enumerate(TENSORS.values()):
        spec = TensorSpec.of(tensor if is_predicted else tensor.contiguous())
        with torch.inference_mode(tag % 2 == 0):
            if transport.rank == 0:
                transport.send(tensor, spec, 1, tag)
            else:
                found.append(transport.receive(spec, 0, tag).wait())
    transport.flush()
    transport.close()
    return found


@pytest.mark.parametrize(
    ("path", "has_slots"),
    [("cuda_ipc", True), ("shared_memory", True), ("shared_memory", False), ("nccl", True)],
)
@pytest.mark.parametrize("is_predicted", [True, False])
def test_a_tensor_arrives_with_its_own_layout(path, has_slots, is_predicted):
    found = run_ranks(all_layouts, 2, path, is_predicted, has_slots)[1]
    for tensor, (name, expected) in zip(found, TENSORS.items(), strict=True):
        assert tensor.stride() == ((3, 1) if name == "expanded" else expected.stride()), name
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
        assert not tensor.is_inference()


# The choice


def chosen_path(options: tuple[str, ...], chosen: str, parts: dict[str, Any], bad_rank: int) -> tuple[list[str], str]:
    """Paths to the other ranks, and what the report says; ``bad_rank`` has other parts."""
    with_paths(*options, **(parts if dist.get_rank() == bad_rank else {}))
    probing.PROBE_SECONDS = 2.0
    try:
        transport = connected(chosen)
    except ConfigError as error:
        return [], str(error)
    text = render_paths(measure_paths(transport, HOST))
    found = [transport.channels[other].path_of(SPEC) for other in transport.stage_ranks if other != transport.rank]
    transport.close()
    return found, text


@pytest.mark.parametrize(("options", "best"), [(PATHS, "cuda_ipc"), (PATHS[1:], "shared_memory"), (PATHS[2:], "nccl")])
def test_auto_takes_the_best_path(options, best):
    for paths, text in run_ranks(chosen_path, 2, options, "auto", {}, 0):
        assert paths == [NAMES[best]]
        assert text.startswith(f"Large tensors travel between stages by {NAMES[best]} (")
        assert "Not by" not in text


class WrongData(IpcOfHost):
    """A byte changes on the way."""

    def read(self, source: Tensor, strides: tuple[int, ...], written: Any) -> Landed:
        landed = super().read(source, strides, written)
        landed.tensor[-1] += 1
        return landed


class WrongWhenUsedAgain(IpcOfHost):
    """The second message in the same memory does not arrive."""

    def write(self, source: Tensor, target: Tensor, written: Any) -> None:
        if not target.any():
            target.copy_(source)


class NoMemory(IpcOfHost):
    def allocate(self, nbytes: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


class NoOpening(IpcOfHost):
    def open(self, exported: bytes) -> Tensor:
        raise RuntimeError("CUDA error: invalid device context\nCUDA kernel errors might be ...")


class Stuck(IpcOfHost):
    def open(self, exported: bytes) -> Tensor:
        time.sleep(20)
        raise AssertionError


@pytest.mark.parametrize(
    ("ipc", "reason"),
    [
        (WrongData, "the data that arrived was wrong"),
        (WrongWhenUsedAgain, "the data that arrived was wrong"),
        (NoMemory, "CUDA out of memory"),
        (NoOpening, "RuntimeError: CUDA error: invalid device context"),
        (Stuck, "no answer within 2 s"),
    ],
)
def test_both_ends_take_the_next_path_if_one_fails_at_one_end(ipc, reason):
    for paths, text in run_ranks(chosen_path, 2, PATHS, "auto", {"ipc": ipc}, 1):
        assert paths == ["shared page-locked memory"]
        assert f"Not by CUDA IPC: {reason} (ranks 0 to 1)." in text


def refuse_lock(memory: Tensor) -> None:
    raise RuntimeError("locking shared memory in RAM failed: 2")


def refuse_edge(one: int, other: int) -> EdgeOfGloo | None:
    edge = new_edge(one, other)
    if edge is not None:
        edge.receive = mock.Mock(side_effect=RuntimeError("NCCL error: Duplicate GPU detected"))
    return edge


def test_gloo_is_left_if_all_fail():
    parts = {"ipc": NoOpening, "lock": refuse_lock, "new_edge": refuse_edge}
    for paths, text in run_ranks(chosen_path, 2, PATHS, "auto", parts, 0):
        assert paths == ["shared memory"]
        assert "Not by shared page-locked memory: locking shared memory in RAM failed: 2 (ranks 0 to 1)." in text
        assert "Duplicate GPU detected" in text


def test_each_two_ranks_have_a_path_of_their_own():
    found = run_ranks(chosen_path, 3, PATHS, "auto", {"ipc": NoOpening}, 2)
    assert [paths for paths, _ in found] == [
        ["CUDA IPC", "shared page-locked memory"],
        ["CUDA IPC", "shared page-locked memory"],
        ["shared page-locked memory"] * 2,
    ]
    assert len({text for _, text in found}) == 1
    assert "CUDA IPC from rank 0 to 1 (" in found[0][1]


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [("cuda_ipc", {"ipc": NoOpening}), ("shared_memory", {"lock": refuse_lock}), ("nccl", {"new_edge": refuse_edge})],
)
def test_a_path_that_is_asked_for_is_refused_where_it_is_impossible(chosen, parts):
    for paths, text in run_ranks(chosen_path, 2, PATHS, chosen, parts, 0):
        assert paths == []
        assert text.startswith(f"`stage_transport={chosen}` is impossible between the ranks 0 and 1: ")
        assert "Use `auto`" in text


def test_stages_that_are_no_neighbours_do_without_nccl():
    for rank, (paths, _) in enumerate(run_ranks(chosen_path, 4, PATHS, "nccl", {}, 0)):
        expected = ["NCCL" if (rank - other) % 2 else "gloo" for other in range(4) if other != rank]
        assert [path.replace("shared memory", "gloo") for path in paths] == expected


def test_paths_of_devices_are_refused_on_the_host():
    for chosen in ("cuda_ipc", "nccl"):
        with pytest.raises(ConfigError, match=f"stage_transport={chosen}` is for tensors of CUDA devices"):
            open_channels([0], mock.Mock(), chosen)


# Ranks that end, and runs in a row


def several_runs(path: str) -> list[int]:
    """Two runs over the same groups; messages that nobody asks for are left in the first."""
    with_paths(path)
    found = []
    for turn in range(2):
        transport = connected(path)
        if transport.rank == 0:
            for tag in range(4):
                transport.send(LARGE + tag + turn, SPEC, 1, tag)
            transport.flush()
        else:
            receipts = [transport.receive(SPEC, 0, tag) for tag in (2, 0, 3, 1)]
            for receipt, tag in list(zip(receipts, (2, 0, 3, 1), strict=True))[: 2 + 2 * turn]:
                assert torch.equal(receipt.wait(), LARGE + tag + turn)
            transport.flush()
        transport.close()
        found.append(dist.get_rank())
        del transport
        gc.collect()
    return found


@pytest.mark.parametrize("path", PATHS)
def test_runs_in_a_row_may_leave_messages(path):
    assert run_ranks(several_runs, 2, path) == [[0, 0], [1, 1]]


def asked_for_late() -> None:
    """A message is asked for only after a later one of the same edge has come."""
    with_paths("nccl")
    transport = connected("nccl")
    if transport.rank == 0:
        transport.send(LARGE, SPEC, 1, 0)
        transport.send(LARGE[: 1 << 17] + 1, TensorSpec.of(LARGE[: 1 << 17]), 1, 1)
        transport.flush()
    else:
        later = transport.receive(TensorSpec.of(LARGE[: 1 << 17]), 0, 1).wait()
        assert torch.equal(later, LARGE[: 1 << 17] + 1)
        assert torch.equal(transport.receive(SPEC, 0, 0).wait(), LARGE)
    transport.close()


def test_a_message_may_be_asked_for_after_a_later_one():
    run_ranks(asked_for_late, 2, timeout=30)


def killed_sender(path: str) -> None:
    with_paths(path)
    transport = connected(path)
    if transport.rank == 1:
        transport.send(LARGE, SPEC, 0, 0)
        transport.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    received = transport.receive(SPEC, 1, 0).wait()
    channel = transport.channels[1]
    try:
        transport.receive(SPEC, 1, 1).wait()
    finally:
        assert torch.equal(received, LARGE)
        if path == "nccl":
            time.sleep(0.5)
            assert True in channel._keeper._edges[1].closed, "what waits for a killed rank on the device is left"


@pytest.mark.parametrize("path", PATHS)
def test_a_killed_sender_is_named(path):
    with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*: rank 1 failed first: .* was killed by SIGKILL"):
        run_ranks(killed_sender, 2, path)
