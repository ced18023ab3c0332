"""Ranks that meet before their process group exists; here they are threads."""

import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from smp_strategy.engine.lifecycle import first_meeting
from smp_strategy.engine.lifecycle.first_meeting import FirstMeeting, init_method
from smp_strategy.errors import ConfigError, PeerFailedError
from smp_strategy.testing import free_port

EVERYWHERE = {"0.0.0.0", "::"}


def meet(settings, *, timeout=30.0, counts=None, lost=str, port=None):
    """What each rank gets: a store, or an error. A rank whose settings are ``None`` does not come."""
    address, found = ("127.0.0.1", port or free_port()), [None] * len(settings)

    def come(rank):
        num_ranks = len(settings) if counts is None else counts[rank]
        meeting = FirstMeeting(address, rank, num_ranks, timeout=timedelta(seconds=timeout), lost=lost)
        try:
            found[rank] = meeting.compare(settings[rank])
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank, each in enumerate(settings) if each is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_with_the_same_settings_get_one_store():
    first, second = meet([{"a": "1"}, {"a": "1"}])
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_all_ranks_learn_which_settings_differ():
    for error in meet([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2"}]):
        assert isinstance(error, ConfigError)
        assert "b: 2 on ranks 0, 2, 3 on rank 1" in str(error)


def test_ranks_that_count_other_ranks_are_told_so():
    for error in meet([{}, {}], counts=[2, 4]):
        assert "the number of ranks: 2 on rank 0, 4 on rank 1" in str(error)


def test_a_rank_that_has_ended_is_not_waited_for():
    error, _ = meet([{}, None], lost=lambda: "Rank 1 has ended.")
    assert isinstance(error, PeerFailedError)
    assert str(error) == "Rank 1 has ended."


def test_a_rank_that_does_not_come_is_named_and_given_up_at_last(caplog, monkeypatch):
    monkeypatch.setattr(first_meeting, "SILENCE_SECONDS", 0.5)
    error, _ = meet([{}, None], timeout=1.5)
    assert isinstance(error, PeerFailedError)
    assert "for all 2 ranks to begin the run together. Missing: rank 1." in str(error)
    assert "It is waited for until the `timeout`" in caplog.text


@pytest.mark.parametrize("attempts", [2])
def test_a_store_that_outlives_a_group_serves_another(attempts):
    address = ("127.0.0.1", free_port())
    kept = [FirstMeeting(address, 0, 1).compare({"a": str(number)}) for number in range(attempts)]
    kept[0].set("key", "value")
    assert not kept[1].check(["key"])


def test_ranks_that_restart_meet_whatever_their_nodes_have_seen_before(monkeypatch):
    """Each node counts its own restarts, and torchrun's store keeps what earlier attempts have written."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with pytest.raises(PeerFailedError):  # an attempt to which one of two has come
        FirstMeeting(("127.0.0.1", served.port), 1, 2, lost=lambda: "Rank 0 has ended.").compare({})
    stores = []
    for value in (b"of a process that has gone", b"of one that is there"):
        first, second = meet([{}, {}], port=served.port)
        assert not first.check(["address"])
        first.set("address", value)
        assert second.get("address") == value
        stores.append(first)
    assert stores[0].get("address") == b"of a process that has gone"


def test_torch_connects_ranks_by_a_store_without_what_earlier_attempts_have_written(monkeypatch):
    assert init_method() is None  # torch's own
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": served.port}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    for _ in range(2):
        store, rank, num_ranks = next(dist.rendezvous(init_method(), timeout=timedelta(seconds=30)))
        assert (rank, num_ranks) == (0, 1)
        assert not store.check(["address"])
        store.set("address", "of a process that will have gone")


def listening(port):
    """Addresses at which this machine listens at ``port``."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            (address, number), state = line.split()[1].split(":"), line.split()[3]
            if state == "0A" and int(number, 16) == port:
                words = bytes.fromhex(address)
                packed = b"".join(words[begin : begin + 4][::-1] for begin in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/net")
@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("127.0.0.1", None, {"127.0.0.1"}),
        ("127.0.0.2", None, {"127.0.0.2"}),
        ("localhost", None, {"127.0.0.1"}),
        # Other machines may know this one by another address.
        ("a-name-of-Debian", ["127.0.1.1"], EVERYWHERE),
        ("with-two-addresses", ["127.0.0.1", "127.0.0.2"], EVERYWHERE),
        ("with-an-address-that-is-translated", ["203.0.113.7"], EVERYWHERE),
    ],
)
def test_the_store_listens_at_the_address_of_the_job_only(host, addresses, expected, monkeypatch):
    port, resolve, store_class = free_port(), socket.getaddrinfo, dist.TCPStore
    if addresses:
        resolved = [each for address in addresses for each in resolve(address, port, type=socket.SOCK_STREAM)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: resolved)
        # torch, which resolves names by itself, does not know this one.
        monkeypatch.setattr(dist, "TCPStore", lambda _, *given, **more: store_class("127.0.0.1", *given, **more))
    first, again = (FirstMeeting((host, port), 0, 1).compare({}) for _ in range(2))
    found = listening(port)
    assert found
    assert found <= expected
    first.set("key", "value")
    assert not again.check(["key"])
