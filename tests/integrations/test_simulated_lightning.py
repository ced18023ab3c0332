"""A Trainer on simulated accelerators, in a process group made beforehand and bound to them."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning_toy import on_ranks, shared_loader, toy_module, toy_trainer

from tests import simulated


class SimulatedAccelerator(Accelerator):
    def setup_device(self, device):
        torch.accelerator.set_device_index(device.index)

    def teardown(self):
        pass

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("simulated", number) for number in range(devices)]

    @staticmethod
    def auto_device_count():
        return 4

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return "simulated"


def fit(folder, smp, library):
    options = {}
    if library is not None:
        simulated.load(library)
        simulated.join("simulated", bound=True)
        options["accelerator"] = SimulatedAccelerator()
    given = dist.group.WORLD
    module, trainer = toy_module(), toy_trainer(folder, smp=smp, use_distributed_sampler=False, max_epochs=1, **options)
    trainer.fit(module, shared_loader(trainer, smp))
    assert dist.group.WORLD is given
    trainer.save_checkpoint(folder / f"{trainer.strategy.root_device.type}.ckpt")
    return torch.load(folder / f"{trainer.strategy.root_device.type}.ckpt", weights_only=False, map_location="cpu")[
        "state_dict"
    ]


@pytest.mark.parametrize(
    "smp", [{"pipeline_parallel_degree": 2}, {"sharded_data_parallel_degree": 2, "offload_activations": True}], ids=str
)
def test_fit_is_that_of_the_cpu(tmp_path, smp):
    everyones = simulated.run_clean(on_ranks, fit, 2, tmp_path, smp, simulated.build())
    for found, expected in zip(everyones, on_ranks(fit, 2, tmp_path, smp, None), strict=True):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
