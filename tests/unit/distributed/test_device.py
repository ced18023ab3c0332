"""Devices: which one a rank computes on, what it is called elsewhere, and which backends ranks need."""

import pickle

import pytest
import torch
import torch.distributed as dist

from smp_strategy.distributed import device as accelerator
from smp_strategy.distributed.device import chosen, generator_of
from smp_strategy.distributed.process_groups import carry_host_tensors
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.lightning import environment
from smp_strategy.integrations.lightning.environment import backend_for, devices_of_launcher
from smp_strategy.model.trace.tensor_spec import TensorSpec

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_without_a_device_a_rank_computes_on_the_processor():
    assert chosen(None) == chosen(CPU) == CPU
    assert generator_of(CPU) is torch.default_generator


def test_what_another_rank_says_of_its_accelerator_is_about_that_of_this_rank(monkeypatch):
    monkeypatch.setattr(accelerator.torch.accelerator, "current_device_index", lambda: 0)
    for device, here in [(GPUS[1], GPUS[0]), (CPU, CPU), (torch.device("meta"), torch.device("meta"))]:
        spec = TensorSpec((2, 3), (3, 1), torch.float32, device, True)
        assert pickle.loads(pickle.dumps(spec)) == TensorSpec((2, 3), (3, 1), torch.float32, here, True)


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ([], "gloo"),
        ([CPU, CPU], "gloo"),
        (GPUS[:1], "cpu:gloo,cuda:nccl"),
        (GPUS, "cpu:gloo,cuda:nccl"),
        (GPUS[:1] * 2, "gloo"),
        ([*GPUS, GPUS[0]], "gloo"),
    ],
    ids=str,
)
def test_groups_carry_tensors_of_the_host_and_use_nccl_where_no_ranks_share_a_device(devices, backend):
    assert backend_for(devices) == backend


@pytest.mark.parametrize(("num_there", "found"), [(1, GPUS[:1] * 2), (4, None)])
def test_processes_of_a_launcher_share_the_one_accelerator_of_a_machine(monkeypatch, num_there, found):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(environment.torch.accelerator, "device_count", lambda: num_there)
    if found is not None:
        assert devices_of_launcher(GPUS[:1]) == found
        return
    with pytest.raises(ConfigError, match=r"Pass `devices=2` or start 1 processes"):
        devices_of_launcher(GPUS[:1])


OF_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@pytest.mark.parametrize(("values", "found"), [(("3", "4", "1", "2"), 2), (("0", "1", "0", "1"), 1)])
def test_processes_of_mpirun_are_the_devices_of_a_trainer_that_is_told_none(values, found, monkeypatch):
    for name, value in zip(OF_MPI, values, strict=True):
        monkeypatch.setenv(name, value)
    host = [torch.device("cpu")]
    assert devices_of_launcher(host) == host * found
    if found == 1:  # ranks that Lightning's launcher has started are not mpirun's
        assert devices_of_launcher(host * 2) == host * 2
    else:
        with pytest.raises(ConfigError, match=r"\(`mpirun -n`\), but that is 2. Pass `devices=2` or start 4 processes"):
            devices_of_launcher(host * 4)


def test_a_process_group_that_cannot_carry_what_ranks_send_is_refused_with_what_to_write():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r'no tensors on xpu.*init_process_group\("cpu:gloo,xpu:xccl"\)'):
            carry_host_tensors("xpu")
    finally:
        dist.destroy_process_group()
