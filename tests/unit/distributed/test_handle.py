"""Handles of asynchronous operations, and the tags of messages."""

import threading
import weakref

import pytest

from smp_strategy.distributed import message_tags
from smp_strategy.distributed.handle import Handle, wait_for


def test_the_operation_is_finished_once_and_its_memory_let_go_of():
    class Memory:
        pass

    memory, calls = Memory(), []
    alive = weakref.ref(memory)
    work = Handle(lambda held=memory: calls.append(type(held)) or "result")
    del memory
    assert not work.is_done()
    assert alive() is not None
    assert [work.wait(), work.wait()] == ["result"] * 2
    assert calls == [Memory]
    assert work.is_done()
    assert alive() is None


def test_an_interrupted_wait_can_be_taken_up_by_the_next_caller():
    attempts = []

    def finish() -> str:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise KeyboardInterrupt
        return "there"

    work = Handle(finish)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert not work.is_done()
    assert work.wait() == "there"


def test_what_follows_is_done_by_the_first_wait():
    log = []
    first = Handle(lambda: 2)
    second = first.then(lambda value: log.append(value) or value + 1)
    wait_for([first])
    assert log == []
    assert second.is_done()
    assert [second.wait(), second.wait()] == [3, 3]
    assert log == [2]


def test_nobody_finishes_what_is_handed_over_before_the_other_thread():
    finished_by = []
    work = Handle(lambda: finished_by.append(threading.current_thread().name), lambda: bool(finished_by))
    finish = work.hand_over()
    waiting = threading.Thread(target=work.wait, name="waiting")
    waiting.start()
    assert not work.is_done()
    other = threading.Thread(target=finish, name="other")
    other.start()
    for thread in (waiting, other):
        thread.join(10)
    assert finished_by == ["other"]


def test_ranges_of_tags_that_share_groups_are_apart():
    reduced = {message_tags.reduced_numbers(digest) for digest in (0, 1, 2**28 - 1, 2**32 - 1)}
    single = {message_tags.NEVER_SENT, message_tags.NUMBERS, message_tags.TEXTS}
    single.add(message_tags.CLOCKS)
    assert len(single) == 4
    assert message_tags.HOOKS < message_tags.SHARED_RESULTS
    assert min(reduced) >= message_tags.SHARED_RESULTS + message_tags.NUM_SHARED_RESULTS
    assert max(reduced) < min(single)
    assert max(single) < 2**31
