"""Waits that threads do."""

import threading
import time

import pytest

from smp_strategy.distributed.background_wait import BackgroundWaits, Relay
from smp_strategy.distributed.handle import Handle


@pytest.fixture
def listeners():
    listeners = BackgroundWaits()
    yield listeners
    listeners.close()


def expected(listeners, wait):
    work = Handle(wait)
    listeners.expect(work)
    return work


def test_work_is_done_when_its_wait_is(listeners):
    message = threading.Event()
    work = expected(listeners, message.wait)
    time.sleep(0.01)
    assert not work.is_done()
    message.set()
    assert work.wait() is True
    assert work.is_done()


def test_the_error_of_a_wait_is_raised_to_whoever_needs_it_each_time(listeners):
    def fail() -> None:
        raise RuntimeError("the connection is gone")

    work = expected(listeners, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            work.wait()
    assert work.is_done()


def test_messages_come_in_any_order(listeners):
    messages = [threading.Event() for _ in range(3)]
    works = [expected(listeners, message.wait) for message in messages]
    for number in (2, 0, 1):
        messages[number].set()
        works[number].wait()
    assert all(work.is_done() for work in works)


def test_threads_are_used_again_and_end():
    before, listeners = threading.active_count(), BackgroundWaits()
    for _ in range(20):
        expected(listeners, lambda: None).wait()
        time.sleep(0.001)  # the thread is free a moment after its message has come
    assert threading.active_count() <= before + 2
    listeners.close()
    assert threading.active_count() == before


def test_jobs_are_done_in_their_order_in_one_other_thread():
    relay = Relay()
    found: list[tuple[int, str]] = []
    jobs = [relay.submit(lambda n=n: found.append((n, threading.current_thread().name))) for n in range(5)]
    assert [job.wait() for job in jobs] == [None] * 5
    assert found == [(n, "relay") for n in range(5)]
    relay.close()


def test_an_error_reaches_who_waits_for_that_job_and_nobody_else():
    relay = Relay()
    fails = relay.submit(lambda: 1 // 0)
    works = relay.submit(lambda: "done")
    assert works.wait() == "done"
    with pytest.raises(ZeroDivisionError):
        fails.wait()
    relay.close()


def test_the_thread_exists_from_the_first_job_until_it_is_closed():
    before = threading.active_count()
    relay = Relay()
    assert threading.active_count() == before
    relay.submit(lambda: None).wait()
    assert threading.active_count() == before + 1
    relay.close()
    assert threading.active_count() == before
