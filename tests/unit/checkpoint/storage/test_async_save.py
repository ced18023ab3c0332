import gc
import subprocess
import sys
import threading
import weakref

import pytest

from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.errors import CheckpointError


class Slow:
    """A job that goes on until it is told to end."""

    def __init__(self, log, name, error=None):
        self.go = threading.Event()
        self.begun = threading.Event()
        self.log, self.name, self.error = log, name, error

    def __call__(self):
        self.begun.set()
        assert self.go.wait(20)
        if self.error:
            raise self.error
        self.log.append(self.name)


def ended(background):
    """Until the thread has nothing more to do."""
    background._work.call.within(20)


def test_the_caller_goes_on_and_what_waits_for_the_checkpoint_comes_after_it():
    log, background = [], BackgroundSave()
    job = Slow(log, "saved")
    assert not background.is_busy
    background.after(lambda: log.append("nothing to wait for"))
    background.start(job)
    background.after(lambda: log.append("first"))
    background.after(lambda: log.append("second"))
    assert background.is_busy
    background.check()
    assert log == ["nothing to wait for"]
    job.go.set()
    background.wait()
    assert log == ["nothing to wait for", "saved", "first", "second"]
    assert not background.is_busy
    background.wait()


def test_one_is_in_flight_at_most():
    log, background = [], BackgroundSave()
    one, two = Slow(log, 1), Slow(log, 2)
    background.start(one)
    background.after(lambda: log.append("after 1"))
    threading.Timer(0.05, one.go.set).start()
    background.start(two)  # waits
    assert log == [1, "after 1"]
    two.go.set()
    background.wait()
    assert log == [1, "after 1", 2]


def test_an_error_is_raised_once_where_the_caller_comes_by_and_nothing_that_waited_is_done():
    log, background = [], BackgroundSave()
    job = Slow(log, 1, OSError(28, "No space left on device"))
    background.start(job, "/runs/x.ckpt")
    background.after(lambda: log.append("the one before is deleted"))
    background.check()
    job.go.set()
    ended(background)
    background.after(lambda: log.append("the one before is deleted"))  # too late, but nobody knows yet
    assert background.is_busy
    with pytest.raises(CheckpointError, match=r"/runs/x\.ckpt was not saved.*No space left on device") as raised:
        background.check()
    assert isinstance(raised.value.__cause__, OSError)
    background.check()
    background.after(lambda: log.append("later"))
    assert log == ["later"]


@pytest.mark.parametrize("call", ["start", "wait"])
def test_the_next_save_and_the_end_raise_it_too(call):
    log, background = [], BackgroundSave()
    job = Slow(log, 1, ValueError("wrong"))
    background.start(job)
    job.go.set()
    following = Slow(log, 2)
    with pytest.raises(CheckpointError, match="wrong"):
        background.start(following) if call == "start" else background.wait()
    assert not following.begun.is_set()
    following.go.set()
    background.start(following)
    background.wait()
    assert log == [2]


def test_an_action_that_fails_is_no_failure_of_the_checkpoint_and_stops_those_behind_it():
    log, background = [], BackgroundSave()
    job = Slow(log, "saved")
    background.start(job)

    def fails():
        raise PermissionError("not yours")

    background.after(fails)
    background.after(lambda: log.append("never"))
    job.go.set()
    with pytest.raises(PermissionError, match="not yours"):
        background.wait()
    assert log == ["saved"]


def test_an_action_that_comes_when_the_checkpoint_is_there_is_done_at_once():
    log, background = [], BackgroundSave()
    job = Slow(log, "saved")
    background.start(job)
    job.go.set()
    ended(background)
    background.after(lambda: log.append(threading.current_thread() is threading.main_thread()))
    assert log == ["saved", True]


def test_what_was_written_is_let_go():
    class Copies:
        pass

    background, copies = BackgroundSave(), Copies()
    seen = weakref.ref(copies)
    background.start(lambda copies=copies: None)
    del copies
    ended(background)
    gc.collect()
    assert seen() is None
    background.wait()


def test_the_interpreter_waits_and_tells_what_nobody_has_asked_for(tmp_path):
    script = """
import sys, time
from pathlib import Path
from smp_strategy.checkpoint.storage.async_save import BackgroundSave
first, second = BackgroundSave(), BackgroundSave()
def write():
    time.sleep(0.3)
    Path(sys.argv[1]).write_text("saved")
def fails():
    time.sleep(0.2)
    raise OSError("no space")
first.start(write)
second.start(fails, "y.ckpt")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], capture_output=True, text=True)
    assert (tmp_path / "x").read_text() == "saved"
    assert "y.ckpt was not saved: OSError: no space" in done.stderr
