"""Calls in threads: one, and one that is repeated."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from smp_strategy.distributed.background_call import BackgroundCall, call_every


def test_a_call_gives_its_result_or_its_error_once_it_is_over():
    go = threading.Event()
    call = BackgroundCall(lambda: go.wait() and "found")
    assert not call.within(0.01)
    assert not call.is_over
    go.set()
    assert call.within(None)
    assert call.get() == "found"
    fails = BackgroundCall(lambda: 1 // 0)
    fails.within(None)
    with pytest.raises(ZeroDivisionError):
        fails.get()


def test_what_a_call_has_used_is_let_go():
    class Buffer:
        pass

    buffer = Buffer()
    seen = weakref.ref(buffer)
    call = BackgroundCall(lambda buffer=buffer: None)
    del buffer
    call.within(None)
    gc.collect()
    assert seen() is None


SCRIPT = """
import sys, time
from pathlib import Path
from smp_strategy.distributed.background_call import BackgroundCall
def write():
    time.sleep(0.3)
    Path(sys.argv[1]).touch()
BackgroundCall(write, is_awaited=sys.argv[2] == "awaited")
"""


@pytest.mark.parametrize("way", ["awaited", "given up"])
def test_the_interpreter_waits_for_a_call_if_it_is_to(way, tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "x"), way], check=True, timeout=60)
    assert (tmp_path / "x").exists() == (way == "awaited")


def test_a_look_is_repeated_until_it_says_that_it_is_over():
    left = [True, True, False, True]
    call_every(0.001, lambda: left.pop(0), "looks").join(20)
    assert left == [True]


def test_a_look_is_repeated_until_it_is_stopped():
    stop, seen = threading.Event(), threading.Event()
    thread = call_every(0.001, lambda: seen.set() is None, "looks", stop)
    assert seen.wait(20)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
