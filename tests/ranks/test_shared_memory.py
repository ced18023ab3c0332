"""Stages that share memory: the bits of gloo and of one process, bounded memory, and peers that are killed."""

import gc
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import smp_strategy.distributed.shared_arena as arenas
import smp_strategy.pipeline.transport.shared_memory_channel as shared
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.shared_arena import Arena
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.open_channels import MeasuredPath, measure_paths, open_channels, render_paths
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for
from tests.parity.test_pipeline import assert_same, one_process, run_pipeline

MIB = 1 << 20
LARGE = torch.arange(MIB, dtype=torch.float32)  # 4 MiB
SPEC = TensorSpec.of(LARGE)


def connected(chosen: str = "shared_memory") -> Transport:
    ranks = list(range(dist.get_world_size()))
    return Transport(ranks, dist.group.WORLD, None, open_channels(ranks, dist.group.WORLD, chosen))


def mappings() -> list[str]:
    """The arenas that this process maps."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "smp_messages" in line]


# The same bits


def trained(name: str, options: dict[str, Any], samples: int) -> tuple[dict[str, Tensor], int]:
    """Weights, and how many tensors this rank has put into shared memory, however small they are."""
    shared.LEAST_BYTES = 1
    with mock.patch.object(Arena, "put", autospec=True, side_effect=Arena.put) as put:
        state, _ = run_pipeline(name, options, samples)
    return state, put.call_count


LAYOUTS = {
    "2 stages": (2, {"microbatches": 4}),
    "2 stages, uneven": (2, {"microbatches": 3}),
    "2 stages, 2 chunks": (2, {"microbatches": 4, "pipeline": "1f1b", "virtual_pipeline_degree": 2}),
    "4 stages": (4, {"microbatches": 4}),
    "4 stages, zb-v": (4, {"microbatches": 4, "pipeline": "zb-v"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_gloo_and_of_one_process(layout):
    pp, options = LAYOUTS[layout]
    expected, _ = one_process("gpt2", options["microbatches"], samples=8)
    options = {"pipeline_parallel_degree": pp, **options}
    for chosen in ("gloo", "shared_memory", "auto") if layout == "2 stages, 2 chunks" else ("shared_memory",):
        ranks = run_ranks(trained, pp, "gpt2", {**options, "stage_transport": chosen}, 8)
        assert_same(expected, ranks[0][0])
        assert all((count > 0) == (chosen != "gloo") for _, count in ranks)


def two_runs() -> list[tuple[list[float], int]]:
    """Losses of two runs of one process, each with an evaluation, and the arenas that are left after each."""
    shared.LEAST_BYTES, found = 1, []
    torch.manual_seed(0)
    model = MODELS["gpt2"]()
    for _ in range(2):
        engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2, stage_transport="shared_memory"))
        engine.attach(model)
        losses = []
        for step in range(2):
            result = engine.train_step(model.loss, batch_for("gpt2", step, 4), loss_of=lambda loss: loss)
            result.commit(torch.ones(()), reduce=True)
            losses.append(result.loss.item())
        losses += [loss.item() for loss in engine.eval_step(model.loss, batch_for("gpt2", 9, 5), kind="val").outputs]
        engine.detach()
        model.zero_grad()
        del engine, result
        gc.collect()
        found.append((losses, len(mappings())))
    return found


def test_arenas_end_with_their_run():
    first, second = run_ranks(two_runs, 2)
    assert first[0] == first[1]  # nothing was updated
    assert [left for _, left in first + second] == [0] * 4


# Memory


def kept_and_dropped() -> list[int]:
    """Bytes of this rank's arena after each step; rank 1 keeps the last tensors of rank 0 for a step."""
    transport, touched, kept = connected(), [], []
    for step in range(6):
        if transport.rank == 0:
            for tag in range(3):
                transport.send(LARGE + tag, SPEC, 1, tag)
        else:
            kept = [transport.receive(SPEC, 0, tag).wait() for tag in range(3)]
            assert all(torch.equal(tensor, LARGE + tag) for tag, tensor in enumerate(kept)), step
        transport.flush()
        dist.barrier()
        touched.append(transport.channels[1 - transport.rank]._own._touched)
    transport.close()
    return touched


def test_memory_is_that_of_the_tensors_that_are_alive():
    sender, receiver = run_ranks(kept_and_dropped, 2)
    assert sender[0] == 3 * SPEC.nbytes
    assert sender[1:] == [6 * SPEC.nbytes] * 5
    assert receiver == [0] * 6


def changed_after_it_was_sent() -> Tensor | None:
    transport = connected()
    tensor = LARGE.clone()
    if transport.rank == 0:
        transport.send(tensor, SPEC, 1, 0)
        tensor.zero_()  # while nobody receives yet
        dist.barrier()
        transport.flush()
        return None
    dist.barrier()
    received = transport.receive(SPEC, 0, 0).wait()
    received += 1  # the receiver's own
    return received


def test_what_is_changed_behind_a_send_arrives_as_it_was():
    assert torch.equal(run_ranks(changed_after_it_was_sent, 2)[1], LARGE + 1)


# Peers that are killed


def sender_is_killed() -> None:
    transport = connected()
    if transport.rank == 1:
        transport.send(LARGE, SPEC, 0, 0)
        transport.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    received = transport.receive(SPEC, 1, 0).wait()
    missing = transport.receive(SPEC, 1, 1)
    try:
        missing.wait()
    finally:
        assert torch.equal(received, LARGE), "the memory of a killed rank is lost"


def receiver_is_killed() -> None:
    transport = connected()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.send(LARGE, SPEC, 1, 0)
    transport.flush()


@pytest.mark.parametrize("part", [sender_is_killed, receiver_is_killed])
def test_a_killed_peer_is_named(part):
    with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*: rank 1 failed first: .* was killed by SIGKILL"):
        run_ranks(part, 2)


def names_of_arenas() -> list[str]:
    transport = connected()
    found = mappings()
    dist.barrier()
    transport.close()
    return found


def test_arenas_have_no_name_that_could_be_left_behind():
    for found in run_ranks(names_of_arenas, 2):
        assert len(found) == 2
        assert all(line.endswith("/memfd:smp_messages (deleted)") for line in found)


# Ranks that cannot share


def of_another_machine(chosen: str) -> tuple[list[str], str]:
    rank = dist.get_rank()
    if rank == 2:
        arenas.process_space = lambda: "another"
    try:
        transport = connected(chosen)
    except ConfigError as error:
        return [], str(error)
    small, large = TensorSpec.of(torch.zeros(1)), SPEC
    paths = [transport.channels[other].path_of(large) for other in range(3) if other != rank]
    assert {transport.channels[other].path_of(small) for other in range(3)} == {"gloo"}
    text = render_paths(measure_paths(transport, torch.device("cpu")))
    transport.close()
    return paths, text


def test_each_two_ranks_take_the_best_path_that_both_can():
    found = run_ranks(of_another_machine, 3, "auto")
    assert [paths for paths, _ in found] == [["shared memory", "gloo"], ["shared memory", "gloo"], ["gloo", "gloo"]]
    assert len({text for _, text in found}) == 1
    assert "shared memory from rank 0 to 1 (" in found[0][1]
    assert "gloo from rank 1 to 2 (" in found[0][1]


def test_shared_memory_is_refused_where_it_is_impossible():
    found = run_ranks(of_another_machine, 3, "shared_memory")
    assert len({text for _, text in found}) == 1
    assert "impossible between the ranks 0 and 2: on another machine" in found[0][1]
    assert "Use `auto`" in found[0][1]


def without_files_in_memory() -> list[str]:
    if dist.get_rank() == 0:
        arenas.os = mock.Mock(spec=["getpid"])
    return [channel.path_of(SPEC) for channel in open_channels([0, 1], dist.group.WORLD)]


def test_a_system_without_shared_memory_has_gloo():
    assert run_ranks(without_files_in_memory, 2) == [["gloo"] * 2] * 2


def test_paths_are_rendered_in_a_sentence():
    one = MeasuredPath(0, 1, "gloo", 1.26e9)
    other = MeasuredPath(1, 2, "gloo", 2.5e9)
    text = "Large tensors travel between stages by gloo ({} GB/s), measured with 4 MiB."
    assert render_paths([one]) == text.format("1.3")
    assert render_paths([one, other]) == text.format("1.3 to 2.5")
