"""``smp run``: scripts that import SageMaker's libraries, without an edit."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from smp_checks import plain

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "sagemaker.md"
SCRIPT = """
import importlib.util
import json
import sys

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from smdistributed.modelparallel import __version__
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from smdistributed.modelparallel.torch.optimizers import FusedLAMB
from smdistributed.modelparallel.torch.state_mod import state
from smdistributed.modelparallel.torch.utils import rmsg
import smdistributed.dataparallel.torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

assert importlib.util.find_spec("smdistributed") and smdistributed.modelparallel.__version__ == __version__
assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "1"]
from smp_checks import adamw, batches, net  # beside the script

smp.init()
assert (smp.pp_size(), state.cfg.microbatches) == (2, 4)


@smp.step
def train_step(model, data, target):
    loss = F.cross_entropy(model(data), target)
    model.backward(loss)
    return loss


model = smp.DistributedModel(net())
optimizer = smp.DistributedOptimizer(adamw(model.parameters()))
losses = []
for data, target in batches():
    optimizer.zero_grad()
    losses.append(train_step(model, data, target).reduce_mean().item())
    optimizer.step()
if smp.rank() == 0:
    print("losses", json.dumps(losses))
    print(rmsg("done"))
"""


def started(*command, folder, **environment):
    paths = os.pathsep.join([str(ROOT), environment.pop("path", "")])
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=given, capture_output=True, text=True, timeout=240
    )


@pytest.mark.dear
@pytest.mark.parametrize("entry", ["smp_strategy.smp", "launch.py"])
def test_a_script_runs_unedited_with_the_parameters_of_a_container(tmp_path, entry):
    [file] = re.findall(r"```python\n(import sys\nfrom smp_strategy.cli.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "launch.py").write_text(file)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "smp_checks.py").write_text((ROOT / "tests/integrations/smp_checks.py").read_text())
    parameters = {"partitions": 2, "microbatches": 4, "ddp": True}
    hyperparameters = json.dumps({"epochs": 1, "mp_parameters": json.dumps(parameters)})
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # Outside of a container the script's path is given; in one the toolkit starts a file in the folder of the code.
    command = [entry] if entry == "launch.py" else ["-m", entry, str(tmp_path / "train.py")]
    folder = tmp_path if entry == "launch.py" else "/"
    done = started(*torchrun, *command, "--epochs", "1", folder=folder, SM_HPS=hyperparameters)
    assert done.returncode == 0, done.stderr[-4000:]
    [losses] = [json.loads(line.removeprefix("losses ")) for line in done.stdout.splitlines() if "losses" in line]
    assert losses == plain(parts=4)[0].tolist()
    assert "[0] done" in done.stdout


SPAWNING = """
import os
import sys

import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.utils import get_distribution_axis
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        import smdistributed.dataparallel.torch.torch_smddp

        assert smp.__name__ == "smp_strategy.smp" and not smp.is_initialized()
        return torch.tensor([index, os.getpid()])


def rank_of(rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    smp.init({"partitions": 2})
    assert smp.allgather(smp.pp_rank(), smp.WORLD) == [0, 1]
    smp.shutdown()


if __name__ == "__main__":
    how, port = sys.argv[1:]
    if how == "ranks":
        torch.multiprocessing.spawn(rank_of, (port,), nprocs=2)
    else:
        numbers, workers = torch.cat(list(DataLoader(Numbers(), num_workers=1, multiprocessing_context=how))).T
        assert numbers.tolist() == [0, 1, 2, 3] and os.getpid() not in workers
    print("done")
"""


@pytest.mark.dear
@pytest.mark.parametrize("how", ["spawn", "forkserver", "ranks"])
def test_processes_that_a_script_starts_have_the_names_too(tmp_path, how):
    (tmp_path / "train.py").write_text(SPAWNING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = started("smp_strategy.cli", "run", "train.py", how, str(port), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "done" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smp_strategy.smp"], "There is no script. Usage: python -m smp_strategy.smp script.py"),
        (["smp_strategy.cli", "run", "nowhere.py"], "There is no script nowhere.py."),
        (["smp_strategy.cli", "run", "version_2.py"], "The script imports `torch.sagemaker`, of version 2"),
        (["smp_strategy.cli", "run", "fails.py"], "FileNotFoundError: .*data.csv"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, arguments, words):
    (tmp_path / "version_2.py").write_text("import torch.sagemaker as tsm\n")
    (tmp_path / "fails.py").write_text("open('data.csv')\n")
    done = started(*arguments, folder=tmp_path)
    assert done.returncode in (1, 2)
    assert re.search(words, done.stderr)


def test_the_real_library_is_not_hidden(tmp_path):
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "installed" / "smdistributed").mkdir(parents=True)
    (tmp_path / "installed" / "smdistributed" / "__init__.py").touch()
    done = started("smp_strategy.cli", "run", "train.py", folder=tmp_path, path=str(tmp_path / "installed"))
    assert done.returncode == 2
    assert "SageMaker's library (`smdistributed`) is installed" in done.stderr
    assert "ran" not in done.stdout
