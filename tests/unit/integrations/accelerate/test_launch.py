"""What ``accelerate launch`` would start, and with which variables; nothing is started here."""

import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config import update
from accelerate.commands.config.config_args import load_config_from_file

from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate.launch import patch_state, variables_for
from smp_strategy.integrations.accelerate.launch_options import LaunchOptions

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))

ON_CPU = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_CPU",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 4,
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
}


class Started(Exception):
    """Raised instead of starting anything."""

    def __init__(self, command, variables):
        super().__init__(command)
        self.command = command
        self.variables = variables


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SMP_", "ACCELERATE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Call ``accelerate launch`` with a file and arguments; returns what it would have started."""

    def popen(command, env):
        raise Started(command, env)

    def torchrun(args):
        raise Started(args, dict(os.environ))

    monkeypatch.setattr("subprocess.Popen", popen)
    monkeypatch.setattr("torch.distributed.run.run", torchrun)

    def call(content, *arguments):
        given = []
        if content is not None:
            (tmp_path / "file.yaml").write_text(yaml.safe_dump(content))
            given = ["--config_file", str(tmp_path / "file.yaml")]
        parsed = launch.launch_command_parser().parse_args([*given, *arguments, "train.py", "--steps", "3"])
        with pytest.raises(Started) as caught:
            launch.launch_command(parsed)
        return caught.value

    return call


def layout_in(variables):
    config = SMPConfig.from_variables(variables)
    return config.pipeline_parallel_degree, config.sharded_data_parallel_degree, config.microbatches


def test_cpu_processes_are_started_by_torchrun_and_know_the_layout(start):
    started = start({**ON_CPU, "smp_config": "pp2_sdp2"}, "--max_restarts", "2")
    assert started.command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert started.command[-3:] == ["train.py", "--steps", "3"]
    assert {"--nproc_per_node=4", "--max_restarts=2"} < set(started.command)
    assert started.variables["ACCELERATE_USE_SMP"] == "true"
    assert started.variables["ACCELERATE_USE_CPU"] == "true"
    assert layout_in(started.variables) == (2, 2, None)


def test_a_file_for_gpus_that_uses_the_cpu_says_so_to_the_processes(start):
    started = start({**ON_CPU, "distributed_type": "MULTI_GPU", "smp_config": {"microbatches": 4}})
    assert started.command.nproc_per_node == "4"
    assert started.variables["ACCELERATE_USE_CPU"] == "true"
    assert started.variables["SMP_MICROBATCHES"] == "4"


def test_several_machines_are_told_to_torchrun(start):
    machines = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "node-a", "main_process_port": 2345}
    started = start({**ON_CPU, **machines, "smp_config": "pp4"})
    expected = {"--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--rdzv_endpoint=node-a:2345"}
    assert expected < set(started.command)


def test_the_environment_alone_selects_too(start, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_SMP", "true")
    monkeypatch.setenv("SMP_CONFIG", "pp2")
    started = start(None, "--cpu", "--num_processes", "2", "--main_process_port", "0", "--module")
    assert {"--nproc_per_node=2", "--module"} < set(started.command)
    assert layout_in(started.variables) == (2, 1, None)


def test_variables_of_the_shell_win(start, monkeypatch):
    monkeypatch.setenv("SMP_PIPELINE_PARALLEL_DEGREE", "4")
    started = start({**ON_CPU, "smp_config": {"pipeline_parallel_degree": 2, "microbatches": 8}})
    assert layout_in(started.variables) == (4, 1, 8)


@pytest.mark.parametrize("in_file", [{}, {"smp_config": False}, {"smp_config": "pp2"}])
def test_where_nothing_is_selected_accelerate_does_what_it_does(in_file, start, monkeypatch):
    if in_file.get("smp_config"):
        monkeypatch.setenv("ACCELERATE_USE_SMP", "false")
    started = start({**ON_CPU, **in_file})
    assert started.command == [sys.executable, "train.py", "--steps", "3"]
    assert not [name for name in started.variables if name.startswith("SMP_")]


def test_the_test_of_accelerate_itself_is_refused():
    script = "/env/accelerate/test_utils/scripts/test_script.py"
    with pytest.raises(ConfigError, match="`accelerate test` runs a script of Accelerate.* Leave `smp_config` out"):
        variables_for(Namespace(training_script=script, smp_config=LaunchOptions("pp2")), {})
    assert variables_for(Namespace(training_script=script), {}) == {}


def test_mpi_is_left_to_start_processes_where_it_is_wanted(start, monkeypatch):
    monkeypatch.setattr(
        "accelerate.utils.launch._get_mpirun_args", lambda: ("mpirun", "--hostfile", "-n", "--npernode", "")
    )
    started = start({**ON_CPU, "smp_config": "pp2"}, "--mpirun_hostfile", "hosts")
    assert started.command[0] == "mpirun"
    assert layout_in(started.variables) == (2, 1, None)


def refused(start, content, *arguments):
    """The message of the ConfigError."""
    with pytest.raises(ConfigError) as caught:
        start(content, *arguments)
    return str(caught.value)


def test_unknown_options_are_refused(start):
    message = refused(start, {**ON_CPU, "smp_config": {"pipeline_paralel_degree": 2}})
    assert "`pipeline_paralel_degree` is not an option. Did you mean `pipeline_parallel_degree`?" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 3}, "must divide the number of ranks (3), but is 2"),
        ({"num_processes": 5, "num_machines": 2}, "must be a multiple of `num_machines` (2)"),
        ({"use_cpu": False, "distributed_type": "MULTI_GPU"}, "there is none here. Say `use_cpu: true`"),
        ({"distributed_type": "FSDP"}, "but the launch is for FSDP"),
        ({"distributed_type": "MEGATRON_LM"}, "but the launch is for Megatron-LM"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(changes, message, start, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert message in refused(start, {**ON_CPU, "smp_config": "pp2", **changes})


def test_the_launchers_for_other_hardware_refuse_too(monkeypatch):
    from accelerate.utils import prepare_deepspeed_cmd_env, prepare_tpu

    parsed = launch.launch_command_parser().parse_args(["train.py"])
    monkeypatch.setenv("ACCELERATE_USE_SMP", "true")
    for prepare, rest in ((prepare_deepspeed_cmd_env, ()), (prepare_tpu, ({},))):
        with pytest.raises(ConfigError, match="smp_strategy is selected"):
            prepare(parsed, *rest)


def test_updating_a_file_keeps_the_layout(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump({**ON_CPU, "smp_config": {"microbatches": 4}}))
    update.update_config(launch.argparse.Namespace(config_file=str(path)))
    assert yaml.safe_load(path.read_text())["smp_config"] == {"microbatches": 4}
    path.write_text(yaml.safe_dump(ON_CPU))
    update.update_config(launch.argparse.Namespace(config_file=str(path)))
    assert "smp_config" not in yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_of_the_repository_are_launched_as_they_say(path, start, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    content = yaml.safe_load(path.read_text())
    assert load_config_from_file(str(path)).num_processes == content["num_processes"]
    started = start(content, "--main_process_port", "0")
    config = SMPConfig.from_variables(started.variables)
    degrees = config.pipeline_parallel_degree * config.sharded_data_parallel_degree * config.tensor_parallel_degree
    assert content["num_processes"] % degrees == 0
    assert started.variables.get("ACCELERATE_USE_CPU", "false") == str(path.stem.startswith("cpu")).lower()


class State:
    """In the place of Accelerate's ``PartialState``."""

    def __init__(self, cpu=False, **options):
        self.options = options


@pytest.mark.parametrize(
    ("selected", "served", "given", "expected"),
    [
        ("true", "True", {}, "smp-meeting://"),
        ("true", "True", {"init_method": "file:///a"}, "file:///a"),
        ("true", "False", {}, None),  # the store ends with rank 0
        ("false", "True", {}, None),  # another program
    ],
)
def test_ranks_meet_before_accelerate_connects_them_where_a_store_outlives_them(
    selected, served, given, expected, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_USE_SMP", selected)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", served)
    if selected == "false":
        monkeypatch.delitem(sys.modules, "smp_strategy.integrations.accelerate.plugin", raising=False)
    patched = type("State", (State,), {"__init__": State.__init__})
    for _ in range(2):
        patch_state(patched)
    assert patched(True, **given).options.get("init_method") == expected
