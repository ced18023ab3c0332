"""The command ``smp profile``, and what its variable changes."""

import sys

import pytest

from smp_strategy.cli import main
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.commands.profiling_run import VARIABLE, end_if_profiled, profiled
from smp_strategy.errors import ConfigError

WRITES = f"import os, pathlib; pathlib.Path(os.environ[{VARIABLE!r}]).write_text('new')"


def profile(path, code):
    return main(["profile", str(path), "--", sys.executable, "-c", code])


def test_the_command_gets_the_file_and_its_partition_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert profile("partition.json", WRITES) == 0
    assert (tmp_path / "partition.json").read_text() == "new"
    assert "Train with `load_partition=True, partition_file='partition.json'`" in capsys.readouterr().out


@pytest.mark.parametrize("existing", [True, False])
def test_a_command_that_trains_nothing_is_told(tmp_path, capsys, existing):
    path = tmp_path / "partition.json"
    if existing:
        path.write_text("of another run")
    assert profile(path, "pass") == 1
    assert "without a training step on stages, so it measured nothing" in capsys.readouterr().err


def test_the_status_of_a_command_that_fails_is_that_of_the_profile(tmp_path):
    assert profile(tmp_path / "partition.json", f"{WRITES}; raise SystemExit(7)") == 7


def test_a_command_that_is_missing_or_cannot_start_is_told(tmp_path, capsys):
    assert main(["profile", str(tmp_path / "partition.json"), "--"]) == 2
    assert "Give the command that trains" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "partition.json"), str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_variable_wins_over_the_options_of_the_program(monkeypatch):
    config = SMPConfig(pipeline_parallel_degree=2, partition_file="mine.json", load_partition=True, skip_tracing=True)
    assert profiled(config) == config
    end_if_profiled()
    monkeypatch.setenv(VARIABLE, "/tmp/partition.json")
    changed = profiled(config)
    assert (changed.partition_file, changed.load_partition) == ("/tmp/partition.json", False)
    assert (changed.trace_execution_times, changed.trace_memory_usage) == (True, True)
    with pytest.raises(ConfigError, match="`auto_partition=False` says that they are placed by hand"):
        profiled(SMPConfig(auto_partition=False, default_partition=0))
    with pytest.raises(SystemExit) as ended:
        end_if_profiled()
    assert ended.value.code == 0
