"""Ranks that torchrun restarts, under Accelerate and under SageMaker's calls. Lightning: ``test_lightning_launch.py``.

torchrun's store has the addresses of the ranks that have died. Rank 1 comes late, so that rank 0 would read them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]

# In its attempt number n, one rank dies after step n.
BEGINNING = """
import json, os, signal, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
from pathlib import Path
from torch import nn

attempt, rank = (int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
time.sleep(1.0 if attempt and rank == 1 else 0.0)

def end_of(step):
    if step == attempt < int(os.environ["DEATHS"]) and rank == attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)

def tell(found):
    sys.stdout.write(f"RANK {rank} ATTEMPT {attempt}: {json.dumps(found)}\\n")
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

class Progress:
    step = 0
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]

accelerator = Accelerator(project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True))
torch.manual_seed(0)
model, data, progress = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(4, 8, 8), Progress()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.register_for_checkpointing(progress)
if any(Path("run/checkpoints").glob("checkpoint_*")):
    accelerator.load_state()
first = progress.step
for step in range(first, 4):
    loss = model(data[step]).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    progress.step = step + 1
    accelerator.save_state()
    end_of(step)
tell([first, loss.item()])
"""

SAGEMAKER = """
import smp_strategy.smp as smp

smp.init({"partitions": 2})
for step in range(4):
    smp.barrier()
    end_of(step)
tell([smp.rank(), smp.pp_size()])
"""


def run(folder, *launcher, deaths):
    """What the ranks of the last attempt tell, and all of the output."""
    ours = ("SMP_", "ACCELERATE_", "LOCAL_", "RANK", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    chosen = {"ACCELERATE_USE_SMP": "true", "ACCELERATE_USE_CPU": "true", "DEATHS": str(deaths)}
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, *launcher, "script.py"],
        cwd=folder,
        env={**inherited, **chosen, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    told = sorted(re.findall(r"RANK (\d) ATTEMPT (\d): (.*)", done.stdout))
    return [(int(rank), int(attempt), json.loads(found)) for rank, attempt, found in told], done.stdout


@pytest.mark.dear
@pytest.mark.parametrize(("door", "restarts"), [("accelerate", 3), ("sagemaker", 1)])
def test_ranks_that_torchrun_restarts_connect_each_time(door, restarts, tmp_path):
    (tmp_path / "script.py").write_text(BEGINNING + (ACCELERATE if door == "accelerate" else SAGEMAKER))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}")
    told, output = run(tmp_path, *torchrun, deaths=restarts)  # real ones: an agent that has forked does not restart
    assert [each[:2] for each in told] == [(0, restarts), (1, restarts)], output
    assert "connectFullMesh" not in output
    if door == "sagemaker":
        assert [each[2] for each in told] == [[0, 2], [1, 2]]
        return
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "script.py").write_text((tmp_path / "script.py").read_text())
    with forked_interpreters():
        [(_, _, [_, undisturbed])], _ = run(tmp_path / "alone", deaths=0)
    assert [each[2] for each in told] == [[restarts, undisturbed]] * 2
