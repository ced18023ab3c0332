"""Waits that threads do."""

import threading
import time

import pytest

from smp_strategy.distributed.background_wait import BackgroundWaits


@pytest.fixture
def listeners():
    listeners = BackgroundWaits()
    yield listeners
    listeners.close()


def test_an_arrival_is_over_when_its_wait_is(listeners):
    message = threading.Event()
    arrival = listeners.expect(message.wait)
    assert not arrival.within(0.01)
    assert not arrival.is_over
    message.set()
    assert arrival.within(10)
    assert arrival.is_over
    assert arrival.value is True


def test_the_error_of_a_wait_is_raised_to_whoever_needs_it_each_time(listeners):
    def fail() -> None:
        raise RuntimeError("the connection is gone")

    arrival = listeners.expect(fail)
    assert arrival.within(10)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            _ = arrival.value


def test_arrivals_come_in_any_order(listeners):
    messages = [threading.Event() for _ in range(3)]
    arrivals = [listeners.expect(message.wait) for message in messages]
    for number in (2, 0, 1):
        messages[number].set()
        assert arrivals[number].within(10)
    assert all(arrival.is_over for arrival in arrivals)


def test_threads_are_used_again_and_end():
    before, listeners = threading.active_count(), BackgroundWaits()
    for _ in range(20):
        assert listeners.expect(lambda: None).within(10)
        time.sleep(0.001)  # the thread is free a moment after its message has come
    assert threading.active_count() <= before + 2
    listeners.close()
    assert threading.active_count() == before


def test_what_was_waited_for_is_counted(listeners):
    assert not listeners.expect(lambda: time.sleep(0.05)).within(0.02)
    assert 0.02 <= listeners.seconds_waited < 0.05
