"""The thread that passes things on."""

import threading

import pytest

from smp_strategy.distributed.collectives.relay import Relay


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
