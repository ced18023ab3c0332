"""What the README shows is what happens: its script, the losses under it, and the pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreters import forked_interpreters

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = re.search(r"```python\n(.*?)```\n", README, re.DOTALL)[1]
PARALLEL = 'strategy="smp", accelerator="cpu", devices=2'
LOSS = re.compile(r"^epoch (\d+): loss (\S+)$", re.MULTILINE)


def run(folder, *command, **environment):
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


def test_the_readme_can_be_read_in_three_minutes():
    assert len(README.splitlines()) <= 120


def test_the_script_prints_the_losses_under_it(tmp_path):
    (tmp_path / "script.py").write_text(CODE)
    assert_is_told(run(tmp_path, "script.py"), is_parallel=True)


@pytest.mark.parametrize(
    ("root", "trainer"),
    [("pytorch_lightning", PARALLEL), ("lightning", 'accelerator="cpu", devices=1')],
    ids=["pytorch_lightning", "a single process"],
)
def test_the_losses_are_those_of_the_other_lightning_and_of_a_single_process(tmp_path, root, trainer):
    code = CODE.replace("import lightning as L", f"import {root} as L").replace(PARALLEL, trainer)
    (tmp_path / "script.py").write_text(code)
    with forked_interpreters():
        told = run(tmp_path, "script.py")
    assert_is_told(told, is_parallel=trainer == PARALLEL)


def assert_is_told(told, *, is_parallel):
    expected = [(epoch, float(loss)) for epoch, loss in LOSS.findall(README)]
    found = [(epoch, float(loss)) for epoch, loss in LOSS.findall(told)]
    assert [epoch for epoch, _ in found] == [epoch for epoch, _ in expected] == list("01234")
    # Processors round differently.
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=5e-4)
    if is_parallel:
        assert "Limited by the " in told
        shown = re.findall(r"^stage \d   [FB].*$", README, re.MULTILINE)
        assert [line for line in told.splitlines() if line in shown] == shown


def test_the_pictures_are_what_the_planner_decides(tmp_path):
    with forked_interpreters():
        run(tmp_path, ROOT / "docs" / "pictures.py", ".", PYTHONPATH=str(ROOT / "examples"))
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert {path.name: path.read_text() for path in tmp_path.glob("*.svg")} == kept, "run `make pictures`"
