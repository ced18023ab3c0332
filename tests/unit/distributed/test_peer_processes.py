"""How processes of this machine have ended."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from smp_strategy.distributed.peer_processes import (
    PeerProcess,
    exit_code_of,
    has_ended,
    how_it_ended,
    is_exiting,
    is_stopped,
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "its process (7) ended with exit code 3."),
        (-signal.SIGSEGV, "its process (7) was killed by SIGSEGV (signal 11)."),
        (
            -signal.SIGABRT,
            "its process (7) was killed by SIGABRT (signal 6), as gloo does when the ranks of a group make different "
            "calls, such as a layer that only some of them compute (see what it printed). More: docs/failures.md, 501",
        ),
        (-signal.SIGKILL, "its process (7) was killed by SIGKILL (signal 9), as the system does when memory runs out"),
        (
            -signal.SIGBUS,
            "its process (7) was killed by SIGBUS (signal 7), as the system does when a file is made shorter",
        ),
        (-41, "its process (7) was killed by signal 41 (signal 41)."),
    ],
)
def test_a_signal_is_named(code, words):
    assert how_it_ended(7, code).startswith(words)


READS_CUT_FILE = """
    import os, torch
    from pathlib import Path
    from smp_strategy.checkpoint.storage.torch_load import load_file

    path = Path("weights.pt")
    torch.save({"weight": torch.ones(1 << 20)}, path)
    state = load_file(path, weights_only=True)
    os.truncate(path, 4096)
    print(state["weight"].sum())
"""


@pytest.mark.timeout(120)
def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path):
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(READS_CUT_FILE)], cwd=tmp_path)
    assert "when a file is made shorter while it is read" in how_it_ended(7, process.returncode)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting():
    """A process that waits, twice."""
    process = subprocess.Popen(["sleep", "60"])
    return process, PeerProcess.of(1, process.pid)


def test_all_may_see_the_exit_code_until_the_parent_asks_for_it():
    process, peer = waiting()
    assert (has_ended(peer), exit_code_of(peer)) == (False, None)
    process.send_signal(signal.SIGBUS)
    wait_until(lambda: has_ended(peer))
    assert exit_code_of(peer) == -signal.SIGBUS
    assert exit_code_of(peer._replace(started="1")) is None  # another process had this number
    process.wait()
    assert (has_ended(peer), exit_code_of(peer)) == (True, None)


def test_a_process_that_the_system_has_said_nothing_of_has_not_ended():
    process, peer = waiting()
    process.kill()
    process.wait()
    assert not has_ended(peer._replace(started="unknown"))


def test_a_process_is_found_again_by_its_line():
    own = PeerProcess.of(3, os.getpid())
    assert (own.rank, own.pid) == (3, os.getpid())
    assert PeerProcess.decode(own.encode()) == own
    assert not has_ended(own)


def test_a_stopped_process_is_seen():
    process, _ = waiting()
    assert is_stopped(process.pid) is False
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid))
    process.kill()
    process.wait()
    assert is_stopped(process.pid) is None


def test_a_process_that_has_begun_to_exit_is_told_from_one_that_runs():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_exiting(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_exiting(process.pid)
    process.communicate()
    assert not is_exiting(process.pid)
