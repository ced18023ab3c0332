"""Programs that run in turns with their scheduler, each in a thread that is used again."""

import gc
import os
import random
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import Streams
from smp_strategy.pipeline.coroutine import Coroutine, ProgramThread, ThreadPool

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def threads() -> Iterator[ThreadPool]:
    threads = ThreadPool()
    yield threads
    threads.close()


def coroutine(body: Callable[[], object], threads: ThreadPool, *, seed: int = 0) -> Coroutine:
    return Coroutine(body, threads, seed=seed, streams=Streams(CPU))


def test_program_and_scheduler_take_turns(threads: ThreadPool) -> None:
    heard: list[str] = []

    def program() -> str:
        for number in range(3):
            heard.append(f"program {number}")
            made.pause()
        return "result"

    made = coroutine(program, threads)
    for number in range(3):
        assert not made.resume()
        heard.append(f"scheduler {number}")
    assert made.resume()
    assert (made.finished, made.result) == (True, "result")
    assert heard == [f"{who} {number}" for number in range(3) for who in ("program", "scheduler")]


def test_many_programs_are_alive_at_once_and_threads_are_used_again(threads: ThreadPool) -> None:
    used: list[set[int]] = []
    for _ in range(3):
        found: set[int] = set()
        running: list[Coroutine] = []

        def program(number: int, running: list[Coroutine] = running, found: set[int] = found) -> int:
            running[number].pause()
            found.add(threading.get_ident())
            return number

        running += [coroutine(lambda number=number: program(number), threads) for number in range(40)]  # type: ignore[misc]
        assert [each.resume() for each in running] == [False] * 40
        assert [each.resume() for each in reversed(running)] == [True] * 40
        assert [each.result for each in running] == list(range(40))
        used.append(found)
    assert len(used[0]) == 40
    assert used[0] == used[1] == used[2]


def test_an_error_is_raised_where_the_program_is_resumed_and_the_thread_goes_on(threads: ThreadPool) -> None:
    def program() -> None:
        made.pause()
        raise KeyError("mine")

    made = coroutine(program, threads)
    made.resume()
    with pytest.raises(KeyError, match="mine"):
        made.resume()
    after = coroutine(threading.get_ident, threads)
    assert after.resume()
    assert after.result != threading.get_ident()


def test_a_cancelled_program_ends_where_it_waits(threads: ThreadPool) -> None:
    heard: list[str] = []

    def program() -> None:
        try:
            made.pause()
        except Exception:
            heard.append("swallowed")
        finally:
            heard.append("finally")
        heard.append("after")

    made = coroutine(program, threads)
    made.resume()
    made.cancel()
    made.cancel()
    assert made.finished
    assert heard == ["finally"]


@pytest.fixture
def _interruptible():
    """A shell lets what it runs in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("pauses", [True, False])
def test_ctrl_c_in_the_turn_of_a_program_ends_it_where_it_waits_next(pauses: bool, threads: ThreadPool) -> None:
    ended = threading.Event()

    def program() -> None:
        try:
            # The scheduler waits for this thread, and is interrupted.
            os.kill(os.getpid(), signal.SIGINT)
            while not interrupted.is_set():
                time.sleep(0.001)
            if pauses:
                task.pause()
        finally:
            ended.set()

    interrupted = threading.Event()
    task = coroutine(program, threads)
    with pytest.raises(KeyboardInterrupt):
        task.resume()
    interrupted.set()
    task.cancel()
    assert ended.is_set()
    assert task.finished
    # Nothing is left behind for the next one; an error in a thread would be one of the test.
    assert coroutine(lambda: None, threads).resume()


def test_a_program_that_never_began_has_nothing_to_cancel(threads: ThreadPool) -> None:
    made = coroutine(lambda: None, threads)
    made.cancel()
    assert not made.finished


def test_modes_and_random_numbers_are_those_of_the_program(threads: ThreadPool) -> None:
    def program() -> tuple[bool, list[float]]:
        drawn = [random.random()]
        with torch.no_grad():
            made.pause()
            drawn.append(random.random())
            return torch.is_grad_enabled(), drawn

    found = []
    for others in (0, 5):
        made = coroutine(program, threads, seed=7)
        made.resume()
        assert torch.is_grad_enabled()
        for _ in range(others):
            random.random()
        made.resume()
        found.append(made.result)
    assert found[0] == found[1]
    assert not found[0][0]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_program_begins_in_the_modes_of_its_scheduler(threads: ThreadPool, inference: bool, grad: bool) -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        made = coroutine(modes, threads)
        made.resume()
    assert made.result == (inference, grad)
    # The next program in this thread finds none of them.
    after = coroutine(modes, threads)
    after.resume()
    assert after.result == (False, True)


def test_nothing_of_a_program_lives_on_in_its_thread(threads: ThreadPool) -> None:
    class Big:
        pass

    def program() -> Big:
        return Big()

    made = coroutine(program, threads)
    made.resume()
    watched = weakref.ref(made.result)
    del made, program
    gc.collect()
    assert watched() is None


def test_too_many_programs_at_once_are_an_error_that_says_so(threads: ThreadPool) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    made = coroutine(int, threads)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))  # files that are open stay open
    try:
        with pytest.raises(UnsupportedError, match=r"Too many open files.*`ulimit -n`"):
            made.resume()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    made.cancel()
    after = coroutine(int, threads)
    assert after.resume()


def test_a_scheduler_that_is_gone_is_nothing_to_complain_about(capfd: pytest.CaptureFixture[str]) -> None:
    """As after an interrupt, while the program ran."""
    going_on, ended = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    def task() -> None:
        going_on.wait(20)
        ended.set()

    thread = ProgramThread()
    scheduler = thread._scheduler
    thread._tasks.append(task)
    scheduler.send(b"\0")
    del thread
    gc.collect()
    assert scheduler.fileno() == -1
    going_on.set()
    assert ended.wait(20)
    for each in set(threading.enumerate()) - before:
        each.join(20)
    assert "BrokenPipeError" not in capfd.readouterr().err


@pytest.mark.parametrize("closes", [True, False])
def test_threads_and_their_sockets_end_with_their_owner(closes: bool) -> None:
    """Closed, or forgotten, as an engine may be."""
    before, open_files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    threads = ThreadPool()
    running: list[Coroutine] = []

    def program() -> None:
        running[0].pause()

    running += [coroutine(program, threads), coroutine(int, threads)]
    for number in (0, 1, 0):
        running[number].resume()
    assert len(set(threading.enumerate()) - before) == 2
    if closes:
        threads.close()
    del threads
    running.clear()
    gc.collect()
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert set(threading.enumerate()) <= before
    assert len(os.listdir("/proc/self/fd")) == open_files
