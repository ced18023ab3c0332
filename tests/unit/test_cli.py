import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import smp_strategy
from smp_strategy.cli import main

ROOT = Path(__file__).parents[2]


def test_help_does_not_wait_for_pytorch():
    code = (
        "import sys\nfrom smp_strategy.cli import main\n"
        "try:\n    main(['export', '--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert shown.startswith("usage: smp export")
    assert shown.splitlines()[-1] == "False"


def test_the_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"smp_strategy {project['version']} (PyTorch ")
    assert smp_strategy.__version__ == project["version"]


def test_the_command_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["smp"] == "smp_strategy.cli:main"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["explode"], "invalid choice"),
        (["export", "a"], "out"),
        (["export", "a", "b", "--max-shard-size", "5 apples"], "no amount of memory"),
        (["export", "a", "b", "--max-shard-size", "0"], "no room"),
        (["export", "a", "b", "--hf", "c", "--form", "full"], "not allowed with"),
        (["import", "a", "b", "--form", "safetensors"], "invalid choice"),
        (["inspect", ""], "the path is empty"),
        (["verify", "a", ""], "the path is empty"),
        (["export", "", "b"], "the path is empty"),
        (["import", "a", ""], "the path is empty"),
        (["explain", ""], "the path is empty"),
    ],
)
def test_mistakes_on_the_command_line_are_told(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "export", "import"])
def test_what_is_not_there_is_told(command, tmp_path, capsys):
    out = [] if command == "inspect" else [str(tmp_path / "out")]
    assert main([command, str(tmp_path / "none"), *out]) == 2
    assert capsys.readouterr().err == f"smp {command}: {tmp_path / 'none'} does not exist.\n"


@pytest.mark.parametrize("command", ["inspect", "export", "import", "explain"])
@pytest.mark.parametrize(("name", "said"), [("/dev/zero", "is a device"), ("fifo", "is a FIFO")])
def test_what_is_no_file_is_refused_instead_of_read_for_ever(name, said, command, tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    out = [str(tmp_path / "out")] if command in ("export", "import") else []
    assert main([command, str(tmp_path / name), *out]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("command", ["export", "import"])
def test_nothing_is_read_for_an_output_that_cannot_be_there(command, form, tmp_path, capsys):
    (tmp_path / "plain.txt").touch()
    for place, kind in (("/dev/null", "a device"), (tmp_path / "plain.txt", "a file")):
        assert main([command, str(tmp_path / "none"), f"{place}/x/out", "--form", form]) == 2
        assert capsys.readouterr().err == (
            f"smp {command}: {place} is {kind}, but a folder is to be written. Name another one.\n"
        )


@pytest.mark.parametrize("name", [".", "/", "folder"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folders_that_are_no_checkpoints_are_told_whatever_is_in_them(name, command, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    os.mkfifo("fifo")
    assert main([command, name if name != "folder" else str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert "is no checkpoint" in captured.out + captured.err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_names_that_are_no_utf_8_are_shown_escaped(command, tmp_path, capsys):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/x\xff.ckpt")
    main([command, path])
    Path(path).touch()
    assert main([command, path]) == 2
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "x\\udcff.ckpt does not exist" in shown
    assert "x\\udcff.ckpt is empty" in shown


@pytest.mark.parametrize(("name", "said"), [("float99", "no floating point type"), ("int8", "no floating point type")])
def test_a_wrong_dtype_is_told_before_anything_is_read(name, said, tmp_path, capsys):
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out"), "--dtype", name]) == 2
    assert said in capsys.readouterr().err
