"""The command line of further ranks."""

import sys
from types import SimpleNamespace

import pytest

from smp_strategy.errors import ConfigError
from smp_strategy.integrations.lightning import launcher as command


class Job(dict):
    """As much of an OmegaConf node as is needed."""

    __getattr__ = dict.__getitem__


def hydra_config(**overrides):
    return SimpleNamespace(
        runtime=SimpleNamespace(cwd="/home/me", output_dir="/runs/0"),
        overrides=SimpleNamespace(task=["seed=1", "+x=2"], **overrides),
        job=Job(name="train", num=3, id="job_3"),
    )


def test_a_plain_script_is_run_again_with_its_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/started/here/train.py", raising=False)
    monkeypatch.chdir("/")  # where the script may have gone meanwhile
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(command, "running_hydra_job", lambda: None)
    arguments, folder = command.child_command(1)
    assert arguments[0] == sys.executable
    assert arguments[1] == "/started/here/train.py"
    assert arguments[2:] == ["--lr", "1"]
    assert folder == "/started/here"


def test_a_rank_of_a_sweep_runs_one_job_in_the_folder_of_rank_zero(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2", "-cn", "mine", "--config-dir=conf"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    job = hydra_config(hydra=["hydra.mode=MULTIRUN", "hydra/launcher=submitit_local", "hydra.verbose=true"])
    monkeypatch.setattr(command, "running_hydra_job", lambda: job)
    arguments, folder = command.child_command(2)
    assert folder == "/home/me"
    assert arguments[1:] == [
        "/home/me/train.py",
        "-cn",
        "mine",
        "--config-dir=conf",
        "seed=1",
        "+x=2",
        "hydra.verbose=true",
        "hydra.mode=RUN",
        'hydra.run.dir="/runs/0"',
        "hydra.output_subdir=null",
        "hydra.job.name=train_rank2",
        "hydra.job.num=3",
        "hydra.job.id='job_3'",
    ]


def test_a_module_is_run_as_a_module(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/pkg/__main__.py", "x"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="pkg.__main__"))
    monkeypatch.setattr(command, "running_hydra_job", lambda: None)
    assert command.child_command(1)[0] == [sys.executable, "-m", "pkg", "x"]


def test_ranks_that_mpirun_has_started_unnoticed_are_refused():
    for alone in ({}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}):
        command.refuse_ranks_of_mpi(alone)
    with pytest.raises(ConfigError, match="`mpirun` has started 8 processes"):
        command.refuse_ranks_of_mpi({"PMI_RANK": "1", "PMI_SIZE": "8"})
