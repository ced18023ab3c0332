"""Processes that one process has started: how their end is told, and that none is left behind."""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from smp_strategy.integrations.autoload import RARELY
from tests.unit.without_torch import STAND_IN

LAUNCHER = """
    import os, sys, time
    from smp_strategy.integrations.lightning import child_processes as children
    children.GRACE_SECONDS, children._POLL_SECONDS = 0.2, 0.05
    processes = []
    ours = children.Children(processes)
    for rank, body in enumerate(sys.argv[1:], 1):
        ours.start(rank, [sys.executable, "-c", body], dict(os.environ), None)
    ours.watch()
"""


def launched(then: str, *bodies: str):
    script = STAND_IN + textwrap.dedent(LAUNCHER) + textwrap.dedent(then)
    return subprocess.run(
        [sys.executable, "-c", script, *bodies], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_child_that_is_killed_ends_a_process_that_waits_for_it_for_ever():
    killed = "import os; os.kill(os.getpid(), 9)"
    done = launched("time.sleep(50)", "import time; time.sleep(50)", killed)
    assert done.returncode == 128 + 9
    assert done.stderr.startswith("rank 2 failed first: its process (")
    assert "was killed by SIGKILL (signal 9)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (0, 0), (143, 0)])
def test_an_exit_code_ends_it_unless_the_child_ended_on_purpose(code, expected):
    then = """
        import threading
        while any(thread.name == "smp-child-watcher" for thread in threading.enumerate()):
            time.sleep(0.01)
    """
    done = launched(then, f"raise SystemExit({code})")
    assert done.returncode == expected
    assert ("rank 1 failed first" in done.stderr) == (expected != 0)


def test_a_child_that_fails_while_it_is_slow_to_exit_ends_the_run_with_an_error():
    done = launched("", "import atexit, os, time; atexit.register(os._exit, 3); atexit.register(time.sleep, 2)")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 failed at the end of the run: its process (")


def test_a_child_that_is_expected_to_end_is_ended_in_silence():
    done = launched("ours.end(patience=0.1); time.sleep(0.5)", "import time; time.sleep(50)")
    assert (done.returncode, done.stderr) == (0, "")


def test_sigterm_ends_the_children_as_well_as_long_as_nobody_handles_it(tmp_path):
    pid = f"pathlib.Path({str(tmp_path / 'pid')!r})"
    body = f"import os, pathlib, time; {pid}.write_text(str(os.getpid())); time.sleep(50)"
    then = f"""
        import pathlib, signal
        while not ({pid}.exists() and {pid}.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(50)
    """
    assert launched(then, body).returncode == -signal.SIGTERM
    assert not is_alive(int((tmp_path / "pid").read_text()))


CHILD = """
import os, pathlib, sys, threading, time
sys.path[:0] = {path!r}
from smp_strategy.integrations.lightning import child_processes as children
children.GRACE_SECONDS, children._POLL_SECONDS = 0.2, 0.05
children.end_with_launcher()
assert "SMP_LAUNCHER" not in os.environ
pathlib.Path("begun").write_text(str(os.getpid()))
time.sleep({seconds})
pathlib.Path("done").touch()
"""
WAITING = """
    import pathlib
    while not (pathlib.Path("begun").exists() and pathlib.Path("begun").read_text()):
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "goes_on"), [("os.kill(os.getpid(), 9)", False), ("os._exit(1)", False), ("", True), ("1 / 0", True)]
)
def test_a_child_ends_if_the_process_is_killed_that_has_started_it(end, goes_on, tmp_path, monkeypatch):
    """One that ends as it should, or says why it does not, has seen to the others itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[4]), *sys.path]))
    launched(textwrap.dedent(WAITING) + end, STAND_IN + CHILD.format(path=sys.path, seconds=1 if goes_on else 50))
    child = int((tmp_path / "begun").read_text())
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    assert (tmp_path / "done").exists() == goes_on


COLLECTING = """
import gc, os, pathlib, sys
sys.path[:0] = {path!r}
thresholds = [gc.get_threshold()]
import smp_strategy
thresholds.append(gc.get_threshold())
from smp_strategy.integrations.lightning.child_processes import end_with_launcher
{then}
end_with_launcher()
pathlib.Path("told").write_text(repr([*thresholds, gc.get_threshold()]))
"""


@pytest.mark.parametrize("own", [None, 900])
def test_a_child_collects_garbage_rarely_until_its_strategy_starts(own, tmp_path, monkeypatch):
    """Nearly all that it makes in its imports stays. A threshold that the script sets meanwhile is not touched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[4]), *sys.path]))
    then = "" if own is None else f"gc.set_threshold({own})"
    assert launched("ours.end(patience=50)", COLLECTING.format(path=sys.path, then=then)).returncode == 0
    before, meanwhile, after = ast.literal_eval((tmp_path / "told").read_text())
    assert meanwhile == (RARELY, *before[1:])
    assert after == (own or before[0], *before[1:])


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended, and that nobody has asked for its exit code, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
