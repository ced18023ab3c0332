"""Who failed first."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from smp_strategy.distributed.failure import (
    blame,
    first_failure,
    introduce,
    publish,
    publish_own,
    raise_lost,
    shortened,
)
from smp_strategy.distributed.peer_processes import PeerProcess, process_space
from smp_strategy.distributed.torch_private import default_store
from smp_strategy.errors import PeerFailedError, UnsupportedError
from smp_strategy.testing import run_ranks


def test_the_first_failure_stays():
    store = dist.HashStore()
    assert first_failure(store, 1) is None
    assert publish(store, 1, "the cause")
    assert not publish(store, 0, "a consequence")
    assert publish(store, 1, "the cause once more")
    assert first_failure(store, 1) == "rank 1 failed first: the cause"


def test_a_failure_is_that_of_its_run_unless_it_is_fatal():
    store = dist.HashStore()
    publish(store, 1, "a mistake", run=1)
    assert first_failure(store, 1) == "rank 1 failed first: a mistake"
    assert first_failure(store, 2) is None
    publish(store, 0, "killed")
    assert first_failure(store, 2) == "rank 0 failed first: killed"


def test_who_fails_after_the_store_is_gone_is_the_first_as_far_as_it_knows():
    class Gone:
        def compare_set(self, key, expected, desired):
            raise dist.DistNetworkError("Broken pipe")

    assert publish(Gone(), 1, "the cause")
    assert first_failure(Gone(), 1) is None


def blame_after_rank_one_failed():
    own = blame(ValueError("mistake")) if dist.get_rank() == 1 else None
    dist.barrier()
    if own is None:
        own = blame(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    return type(own).__name__, str(own)


def test_a_broken_connection_names_the_rank_that_failed():
    (kind, text), own = run_ranks(blame_after_rank_one_failed, 2)
    assert kind == PeerFailedError.__name__
    assert text == "rank 1 failed first: ValueError: mistake"
    assert own == ("ValueError", "mistake")


def mistake_of_the_user():
    raise ValueError("two\nlines")


def published_by(rank):
    """What the others are told of an error of ``rank``, and who is the first."""
    is_first = None
    if dist.get_rank() == rank:
        with pytest.raises(ValueError, match="two") as caught:
            mistake_of_the_user()
        is_first = publish_own(caught.value)
    dist.barrier()
    told = blame(RuntimeError("Connection reset by peer"))
    return is_first, publish_own(ValueError("later")), publish_own(told), str(told)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_is_told_with_the_line_of_the_user_where_it_arose(rank):
    for each, (is_first, later, of_another, told) in enumerate(run_ranks(published_by, 3, rank)):
        assert is_first == (True if each == rank else None)
        assert later == (each == rank)
        assert not of_another
        line = mistake_of_the_user.__code__.co_firstlineno + 1
        words = f"rank {rank} failed first: ValueError: two\nlines ({__file__}, line {line}, in mistake_of_the_user)"
        assert told == words


def long_mistake():
    raise ValueError("the first\n" + "between\n" * 10 + "the last")


def published_long():
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="first") as caught:
            long_mistake()
        publish_own(caught.value)
    dist.barrier()
    return str(blame(RuntimeError("Connection reset by peer")))


def test_of_a_long_message_the_others_are_told_the_beginning_and_the_end():
    line = long_mistake.__code__.co_firstlineno + 1
    words = f"rank 1 failed first: ValueError: the first ... the last ({__file__}, line {line}, in long_mistake)"
    assert run_ranks(published_long, 2) == [words] * 2


def without_rank_zero():
    """Rank 0, which serves the store, ends without a word."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world_size=2, is_master=rank == 0, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    before = publish_own(PeerFailedError("no")), first_failure(store, 1)
    dist.barrier()
    if rank == 0:
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        dist.barrier()
    told = blame(caught.value)
    Path(os.environ["TOLD"]).write_text(f"{before}|{type(told).__name__}|{told}")


def test_where_rank_zero_is_gone_it_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    with pytest.raises(RuntimeError, match="rank 0:\nthe process ended without a result"):
        run_ranks(without_rank_zero, 2)
    before, kind, told = (tmp_path / "told").read_text().split("|")
    assert (before, kind) == ("(False, None)", "PeerFailedError")
    assert told == "Rank 0 is gone: it was killed, or has ended. Rank 1 ends because of that."
    # Each call of a store that is gone prints a screen.
    assert "TCPStore" not in capfd.readouterr().err


def beside_an_exiting_launcher():
    """A rank loses its connection while its launcher exits, but still accepts connections: returns the error, and
    whether the rank has looked at its parent and connected."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with (
        mock.patch("smp_strategy.distributed.failure.is_exiting", return_value=True) as is_exiting,
        mock.patch("smp_strategy.distributed.failure.socket.create_connection") as connect,
    ):
        told = blame(RuntimeError("Connection reset by peer"))
    return str(told), is_exiting.call_args.args == (os.getppid(),), connect.called


def test_the_store_of_a_launcher_in_the_middle_of_its_exit_is_not_asked():
    ((told, is_parent, is_asked),) = run_ranks(beside_an_exiting_launcher, 1)
    assert told == "Rank 0 is gone: it was killed, or has ended. Rank 0 ends because of that."
    assert is_parent
    assert not is_asked


def lost_by(kind):
    """What this rank is told of a rank of its machine that has ended in a way of its own."""
    introduce()
    process = subprocess.Popen([sys.executable, "-c", ENDS.format(kind=kind)], stdin=subprocess.PIPE)
    line = PeerProcess.of(1, process.pid).encode()
    default_store().append(f"smp_strategy/processes/{process_space()}", line)
    process.stdin.close()
    if kind == "gone":
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(PeerFailedError) as caught:
        raise_lost(RuntimeError("Connection reset by peer"), [1, 2], "waiting for")
    return str(caught.value).replace(str(process.pid), "PID"), first_failure(default_store(), 1) is not None


ENDS = """
import os, sys
sys.stdin.read()
os.kill(os.getpid(), 7) if "{kind}" == "bus" else os._exit(0 if "{kind}" == "end" else 3)
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "bus",
            "rank 1 failed first: its process (PID) was killed by SIGBUS (signal 7), as the",
        ),
        ("code", "rank 1 failed first: its process (PID) ended with exit code 3."),
        ("end", "rank 1 failed first: its process (PID) has ended with exit code 0, while rank 0 was waiting for it."),
        (
            "gone",
            "rank 1 failed first: its process (PID) has ended without a word, as one does that is killed.",
        ),
    ],
)
def test_a_rank_of_this_machine_that_was_killed_is_told_with_the_signal(kind, words, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ((told, is_published),) = run_ranks(lost_by, 1, kind)
    assert told.startswith(words)
    assert is_published


def test_without_process_group_an_error_is_its_own():
    error = RuntimeError("connection")
    assert blame(error) is error


def test_a_connection_that_breaks_names_the_other_rank():
    message = r"While sending a tensor to rank 3, the connection failed: reset by peer"
    with pytest.raises(PeerFailedError, match=message) as caught:
        raise_lost(RuntimeError("reset by peer"), 3, "sending a tensor to")
    assert str(caught.value.__cause__) == "reset by peer"


def test_an_error_of_this_package_is_raised_as_it_is():
    error = UnsupportedError("no")
    with pytest.raises(UnsupportedError) as caught:
        raise_lost(error, 3, "sending a tensor to")
    assert caught.value is error


def test_a_very_long_message_is_told_to_others_without_its_middle():
    assert shortened("short") == "short"
    told = shortened("a" + "x" * 2_000_000 + "z")
    assert len(told) < 2100
    assert (told[0], told[-1]) == ("a", "z")
