"""Without `memory_limit` ranks share the memory of an accelerator, and each stage has that of its poorest rank."""

import os
from unittest import mock

import pytest
import torch

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import device_memory
from smp_strategy.distributed.device_memory import DeviceMemory, memory_of_stages, shared
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.parity.models import Text, batch_for

ONE, OTHER = DeviceMemory("GPU-1", 1000), DeviceMemory("GPU-2", 900)


@pytest.mark.parametrize(
    ("memories", "expected"),
    [
        ([ONE, OTHER], (900, 1000)),  # rank 0 has the last stage
        ([ONE, ONE], (500, 500)),
        ([None, None], (None, None)),
        ([ONE, ONE, ONE, OTHER], (333, 333)),
        ([ONE, OTHER, ONE, OTHER], (450, 500)),
    ],
)
def test_each_stage_has_what_its_poorest_rank_has(memories, expected):
    assert shared(memories, MeshShape(pp=2, dp=len(memories) // 2)) == expected


def test_processes_that_see_one_accelerator_each_call_all_of_them_by_the_same_number_and_share_none(monkeypatch):
    properties = mock.Mock(total_memory=1000, uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_memory.device_memory(torch.device("cuda", 0)) == ONE
    del properties.uuid
    numbered = [device_memory.device_memory(torch.device("cuda", number)) for number in (0, 0, 1)]
    assert numbered[0] == numbered[1] != numbered[2]
    assert device_memory.device_memory(torch.device("cpu")) is None


def told(identities: dict[int, str]) -> tuple[int | None, ...]:
    rank = int(os.environ["RANK"])
    with mock.patch.object(device_memory, "device_memory", return_value=DeviceMemory(identities[rank], 1000)):
        return memory_of_stages(torch.device("cpu"), MeshShape(pp=2, dp=1))


@pytest.mark.parametrize(("identities", "most"), [({0: "a", 1: "a"}, 500), ({0: "a", 1: "b"}, 1000)])
def test_ranks_tell_each_other_what_they_compute_on(identities, most):
    assert run_ranks(told, 2, identities) == [(most, most)] * 2


def within_a_shared_device(nbytes: int | None) -> tuple[list[int | None], bool]:
    torch.manual_seed(0)
    model = Text()
    options = {} if nbytes is None else {"activation_checkpointing": "auto"}
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=4, pipeline="1f1b", **options))
    engine.attach(model, [torch.optim.SGD(model.parameters(), 0.1)])
    device = None if nbytes is None else DeviceMemory("GPU-1", nbytes)
    with mock.patch.object(device_memory, "device_memory", return_value=device):
        engine.train_step(model.loss, batch_for("text", 0, 8), loss_of=lambda loss: loss)
    assert engine.partition is not None
    stages = engine.partition.stages
    return [stage.memory_limit or stage.memory_bytes for stage in stages], bool(engine.layout.activation_policies)


def test_two_stages_on_one_accelerator_compute_again_what_does_not_fit_into_half_of_it():
    [(needed, _), _] = run_ranks(within_a_shared_device, 2, None)
    roomy, tight = 2 * max(needed), 2 * max(needed) - 2
    assert run_ranks(within_a_shared_device, 2, roomy) == [([roomy // 2] * 2, False)] * 2
    assert run_ranks(within_a_shared_device, 2, tight) == [([tight // 2] * 2, True)] * 2
