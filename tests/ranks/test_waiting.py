"""Ranks that wait for others that never come are told so, whatever they wait for."""

import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from smp_strategy.distributed import deadlock as watch
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.distributed.failure import begin_run, publish, publish_own
from smp_strategy.errors import ApartError, PeerFailedError
from smp_strategy.testing import run_ranks


def hurry(silence=60.0):
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS, watch.LIFE_SECONDS = 0.3, 0.1, 0.2
    watch.SILENCE_SECONDS = silence


def told(part):
    """What this rank is told while it does its ``part``."""
    hurry()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    began = time.monotonic()
    try:
        part(dist.get_rank(), groups)
    except (ApartError, PeerFailedError) as error:
        return f"{error}", time.monotonic() - began
    return "nothing", 0.0


def reduced(group, doing, numel=1):
    collectives.all_reduce(torch.ones(numel), group=group, doing=doing).wait()


def different_calls(rank, groups):
    collectives.barrier("saving" if rank == 0 else "loading")


def one_more_collective(rank, groups):
    if rank == 0:
        collectives.all_reduce(torch.ones(1), group=groups[0], doing="a sum")
    collectives.barrier("saving", groups[0])


def numbers_against_a_sum(rank, groups):
    if rank == 0:
        collectives.reduce_numbers(torch.ones(2), group=groups[0], doing="a norm").wait()
    else:
        reduced(groups[0], "sums of gradients", 1000)


def other_numbers(rank, groups):
    collectives.reduce_numbers(torch.ones(2 + rank), group=groups[0], doing=f"the number {rank}").wait()


def two_groups(rank, groups):
    reduced(groups[rank], f"the sum {rank}")
    reduced(groups[1 - rank], f"the sum {1 - rank}")


def objects_against_a_sum(rank, groups):
    if rank == 0:
        collectives.gather_objects("x" * 100, "what ranks write", groups[0])
    else:
        reduced(groups[0], "sums of gradients", 1000)


def shards_against_a_decision(rank, groups):
    if rank == 0:
        collectives.tell("go", 0, "a decision of rank 0", groups[1])
    else:
        GlooCollectives(groups[0]).gather(torch.empty(4), torch.ones(2)).wait()


def a_message_that_nobody_sends(rank, groups):
    if rank == 0:
        collectives.receive(torch.empty(1), 1, "a part of a state")
    else:
        collectives.barrier("saving")


@pytest.mark.parametrize("part", [different_calls, one_more_collective])
def test_ranks_in_different_calls_are_told_at_once_where_both_are(part):
    for message, _ in run_ranks(told, 2, part):
        assert "Ranks are in different calls that all of them have to make together" in message
        assert "rank 0: saving, after" in message
        assert "test_waiting.py, line" in message


@pytest.mark.daily
@pytest.mark.parametrize(
    ("part", "waits"),
    [
        (two_groups, ("the sum 0", "the sum 1")),
        (numbers_against_a_sum, ("a norm", "sums of gradients")),
        (other_numbers, ("the number 0", "the number 1")),
        (objects_against_a_sum, ("what ranks write", "sums of gradients")),
        (shards_against_a_decision, ("a decision of rank 0", "parts of weights")),
        (a_message_that_nobody_sends, ("a part of a state", "saving")),
    ],
)
def test_ranks_that_wait_for_each_other_are_told_what_for_and_where(part, waits):
    found = run_ranks(told, 2, part)
    for message, _ in found:
        assert "wait for each other for ever" in message, message
        for rank, doing in enumerate(waits):
            assert f"rank {rank}: for {doing}; " in message
    assert any("test_waiting.py, line" in message for message, _ in found)


def a_circle_of_four():
    hurry()
    pairs = [dist.new_group(sorted([rank, (rank + 1) % 4])) for rank in range(4)]
    rank = dist.get_rank()
    try:
        reduced(pairs[rank], f"the sum of pair {rank}")
    except (ApartError, PeerFailedError) as error:
        return str(error)


def test_a_circle_of_four_ranks_is_found():
    for message in run_ranks(a_circle_of_four, 4):
        assert all(f"rank {rank}: for the sum of pair {rank}; " in message for rank in range(4)), message


def stop(where):
    hurry(silence=1.5)
    watch.LIFE_SECONDS = 60.0  # the first sign of life is given at once
    if where == "store":
        dist.destroy_process_group()
        port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    collectives.barrier("the beginning")
    if dist.get_rank() == (0 if where == "store" else 1):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    reduced(None, "a sum")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rank 1", r"Rank 1 has given no sign of life while this rank waited \d s for a sum: it is stopped"),
        ("store", "The store of the process group has not answered for 2 s while this rank waited for a sum"),
    ],
)
def test_a_rank_that_is_stopped_is_named(where, said):
    with pytest.raises(RuntimeError, match=said):
        run_ranks(stop, 2, where, timeout=40)


def at_work():
    hurry(silence=0.7)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("smp_strategy").addHandler(handler)
    collectives.barrier("the beginning")
    total = torch.ones(1)
    if dist.get_rank() == 1:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
    collectives.all_reduce(total, group=None, doing="a sum").wait()
    return total.item(), lines


def test_a_rank_at_work_is_waited_for_and_one_line_says_where_it_is():
    (total, lines), (_, none) = run_ranks(at_work, 2)
    assert total == 2
    assert not none
    (line,) = lines
    assert line.startswith("Rank 0 has waited")
    assert "for a sum. At work meanwhile: rank 1 (" in line
    assert "in at_work" in line


def fail_and_stay():
    hurry()
    collectives.barrier("the beginning")
    if dist.get_rank() == 1:
        publish(dist.distributed_c10d._get_default_store(), 1, "OSError: the disk is full")
        time.sleep(2)
        return ""
    try:
        reduced(None, "a sum")
    except PeerFailedError as error:
        return str(error)


def test_a_rank_that_has_failed_is_named_while_its_process_lives():
    message, _ = run_ranks(fail_and_stay, 2)
    assert message.startswith("rank 1 failed first: OSError: the disk is full\nrank 0 waited for a sum.")


def fail_and_start_again():
    rank, total, first = dist.get_rank(), torch.ones(1), OSError("the disk is full")
    if rank == 1:
        assert publish_own(first)
    begin_run()
    hurry()
    if rank == 1:
        time.sleep(1.5)
    collectives.all_reduce(total, group=None, doing="a sum").wait()
    assert total.item() == 2
    if rank == 0:
        assert publish_own(ValueError("a mistake"))
        return "nothing"
    try:
        reduced(None, "a sum that never comes")
    except PeerFailedError as error:
        return str(error)


def test_a_failure_from_before_the_start_ends_no_wait_and_the_next_one_does():
    assert "rank 0 failed first: ValueError: a mistake" in run_ranks(fail_and_start_again, 2)[1]


def fail_in_the_next_run():
    hurry()
    if dist.get_rank() == 1:
        begin_run()
        assert publish_own(OSError("the disk is full"))
        time.sleep(2)
        return ""
    try:
        reduced(None, "a sum")
    except PeerFailedError as error:
        return str(error)


def test_a_rank_that_fails_in_the_next_run_already_is_named():
    assert run_ranks(fail_in_the_next_run, 2)[0].startswith("rank 1 failed first: OSError: the disk is full")


def exchanges():
    rank, group = dist.get_rank(), dist.new_group([2, 0, 1])
    sent = torch.arange(3.0) + rank
    if rank == 2:
        collectives.send(sent, 0, "a part")
        collectives.send_object({"a": 1}, 0, "an object")
    elif rank == 0:
        collectives.receive(sent, 2, "a part")
        assert collectives.receive_object(2, "an object") == {"a": 1}
    return (
        collectives.gather_numbers(rank, "numbers", group),
        collectives.gather_objects("x" * rank, "objects", group),
        collectives.tell(["from", rank], 2, "a decision", group),
        collectives.collect((rank, "y" * 10 * rank), 1, "states"),
        sent.tolist(),
    )


def test_what_ranks_tell_each_other_arrives():
    for rank, (numbers, objects, told, collected, sent) in enumerate(run_ranks(exchanges, 3)):
        assert numbers == [0, 1, 2]
        assert objects == ["", "x", "xx"]
        assert told == ["from", 2]
        assert collected == ([(each, "y" * 10 * each) for each in range(3)] if rank == 1 else [])
        assert sent == ([2.0, 3.0, 4.0] if rank == 0 else [rank, rank + 1, rank + 2])


def numbers_of_three():
    group = dist.new_group(range(3))
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        each = torch.tensor([1.0, dist.get_rank()])
        collectives.reduce_numbers(each, op, group=group, doing="numbers").wait()
        found.append(each.tolist())
    one = torch.tensor(dist.get_rank())
    collectives.reduce_numbers(one, dist.ReduceOp.MAX, group=group, doing="one number").wait()
    return found, one.item()


def test_numbers_are_reduced_alike_on_all_ranks():
    assert run_ranks(numbers_of_three, 3, timeout=60) == [([[3.0, 3.0], [1.0, 2.0], [1.0, 0.0]], 2)] * 3
