"""Who failed first."""

import pytest
import torch.distributed as dist

from smp_strategy.errors import PeerFailedError, UnsupportedError
from smp_strategy.failure import blame, first_failure, publish, raise_lost
from smp_strategy.testing import run_ranks


def test_the_first_failure_stays():
    store = dist.HashStore()
    assert first_failure(store) is None
    publish(store, 1, "the cause")
    publish(store, 0, "a consequence")
    assert first_failure(store) == "rank 1 failed first:\nthe cause"


def blame_after_rank_one_failed():
    own = blame(ValueError("mistake")) if dist.get_rank() == 1 else None
    dist.barrier()
    if own is None:
        own = blame(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    return type(own).__name__, str(own)


def test_a_broken_connection_names_the_rank_that_failed():
    (kind, text), own = run_ranks(blame_after_rank_one_failed, 2)
    assert kind == PeerFailedError.__name__
    assert text.startswith("rank 1 failed first:\nValueError: mistake")
    assert own == ("ValueError", "mistake")


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
