"""Scripts under ``accelerate launch``: layouts that the file or the environment chooses, on one machine and on two.

The launcher starts real interpreters once; elsewhere they are forked.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate_checks import on_ranks
from torch import nn

from smp_strategy import SMPPlugin
from smp_strategy.integrations.accelerate.plugin import join_group
from smp_strategy.testing import free_port
from tests.interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]

# It imports nothing of ours. Loss inside of the model for the first epoch, outside for the second.
SCRIPT = """
import os, sys, warnings
warnings.filterwarnings("ignore")
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y=None):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x if y is None else {"loss": (x - y).square().mean()}

accelerator = Accelerator()
torch.manual_seed(0)
model, data = Net(), torch.randn(32, 8)
loader = DataLoader(TensorDataset(data), batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inside in (True, False):
    for (batch,) in loader:
        loss = model(batch, -batch)["loss"] if inside else (model(batch) + batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
smp = getattr(accelerator, "smp", None)
world = f"{os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}"
stages = smp.shape.pp if smp is not None else "no"
sys.stdout.write(f"RANK {world}: {stages} stages, {accelerator.num_processes} replicas, loss {loss.item():.6f}\\n")
"""

ON_CPU = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_CPU",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
}


def begin(folder, *command, **environment):
    """Start this Python with ``command`` in ``folder``."""
    (folder / "script.py").write_text(SCRIPT)
    ours = ("SMP_", "ACCELERATE_", "LOCAL_", "RANK", "WORLD_SIZE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    """Exit code and output."""
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, output


def launch(folder, content, *arguments, **environment):
    """Start ``accelerate launch`` with a file of ``content``."""
    (folder / "file.yaml").write_text(yaml.safe_dump(content))
    command = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "file.yaml", *arguments)
    return begin(folder, *command, "script.py", **environment)


def told(output):
    """What each rank says, by rank."""
    return sorted(re.findall(r"RANK (.*)", output))


@pytest.fixture(scope="module")
def plain_loss(tmp_path_factory):
    """The last loss of the same script in one process, under Accelerate as it is."""
    with forked_interpreters():
        code, output = end(begin(tmp_path_factory.mktemp("plain"), "script.py", ACCELERATE_USE_CPU="true"))
    assert code == 0, output
    [line] = told(output)
    assert line.startswith("0 of 1: no stages, 1 replicas, loss ")
    return line.rpartition(" ")[2]


@pytest.mark.one_in(1)
def test_a_file_makes_a_pipeline_of_a_script_that_knows_of_none(plain_loss, tmp_path):
    code, output = end(
        launch(tmp_path, {**ON_CPU, "smp_config": {"microbatches": 2}}, SMP_PIPELINE="1f1b", SMP_REPORT="full")
    )
    assert code == 0, output
    assert told(output) == [f"{rank} of 2: 2 stages, 1 replicas, loss {plain_loss}" for rank in range(2)]
    assert "schedule 1f1b with 2 microbatches" in output


def test_two_machines_are_one_pipeline(plain_loss, tmp_path):
    address = {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    content = {**ON_CPU, **address, "smp_config": "pp2_mb2"}
    with forked_interpreters():
        launchers = [launch(folder, content, "--machine_rank", str(rank)) for rank, folder in enumerate(folders)]
    for rank, (code, output) in enumerate([end(launcher) for launcher in launchers]):
        assert code == 0, output
        assert told(output) == [f"{rank} of 2: 2 stages, 1 replicas, loss {plain_loss}"]


def test_switched_off_the_launcher_is_as_it_was(tmp_path):
    code, output = end(launch(tmp_path, {**ON_CPU, "smp_config": "pp2"}, SMP_AUTOLOAD="0"))
    assert code != 0
    assert "unknown keys (['smp_config'])" in output


# --- the Accelerator ------------------------------------------------------------------------------------------------


def select(word="true"):
    """As in a new process that has these variables."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(ACCELERATE_USE_SMP=word, SMP_MICROBATCHES="3")


def choices():
    found = {}
    for word in ("true", "false", ""):
        select(word)
        smp = getattr(Accelerator(cpu=True), "smp", None)
        found[word] = None if smp is None else smp.config.microbatches
    return found


def test_a_bare_accelerator_gets_the_layout_of_the_environment_where_it_is_selected():
    assert on_ranks(choices, 1) == [{"true": 3, "false": None, "": None}]


def given_in_code():
    select()
    config = Accelerator(cpu=True, parallelism_config=SMPPlugin(pipeline="1f1b")).smp.config
    with pytest.raises(ValueError, match="gives Accelerate another `parallelism_config` .ParallelismConfig."):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    return config.pipeline, config.microbatches


def test_a_plugin_in_the_script_stays_and_another_parallelism_is_refused():
    assert on_ranks(given_in_code, 1) == [("1f1b", 3)]


def trained_alone():
    torch.distributed.destroy_process_group()
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(ValueError, match="2 processes were started, but Accelerate has found no accelerator"):
        join_group(torch.device("cpu"), None)
    os.environ["WORLD_SIZE"] = "1"
    model = Accelerator(parallelism_config=SMPPlugin(), cpu=True).prepare(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    )
    model(torch.zeros(1, 2)).sum().backward()
    return model[0].weight.grad is not None


def test_one_process_alone_trains_and_several_that_do_not_know_of_each_other_are_refused():
    assert on_ranks(trained_alone, 1) == [True]


def after_a_plain_one():
    select("false")
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="has made an Accelerator without SMPPlugin before"):
        Accelerator(cpu=True, parallelism_config=SMPPlugin())
    os.environ["ACCELERATE_USE_SMP"] = "true"
    with pytest.raises(ValueError, match="Give the plugin to the first one"):
        Accelerator(cpu=True)


def test_a_plugin_that_accelerate_would_pass_over_is_told():
    on_ranks(after_a_plain_one, 1)


def run_page():
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "accelerate.md").read_text(), re.DOTALL)
    [script] = [block for block in blocks if "SMPPlugin(" in block]
    names = {}
    exec(compile(script, "docs/accelerate.md", "exec"), names)
    return names["loss"].item(), names["accelerator"].smp.shape.pp


def test_the_script_in_the_page_about_accelerate_trains():
    first, second = on_ranks(run_page, 2)
    assert first == second
    assert first[1] == 2
