"""Ranks of a test end together when all is well, and at once when not."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp_strategy.testing import free_port, run_ranks


def state_of_a_rank_that_is_done() -> str:
    """What rank 1 sees of the process of rank 0 (R: runs, S: sleeps, Z: has ended), a while after its function has."""
    pid = torch.tensor(os.getpid())
    if dist.get_rank() == 0:
        dist.send(pid, dst=1)
        return ""
    dist.recv(pid, src=0)
    time.sleep(0.5)
    return Path(f"/proc/{pid.item()}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_that_is_done_does_not_hang_up_on_others():
    assert run_ranks(state_of_a_rank_that_is_done, 2)[1] in {"R", "S"}


def fail_or_wait(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "killed":
            os._exit(1)
        raise ValueError("this one")
    if dist.get_rank() == 2:
        return
    dist.recv(torch.zeros(1), src=1)


@pytest.mark.parametrize(("how", "text"), [("failed", "this one"), ("killed", "ended without a result")])
def test_a_rank_that_fails_does_so_at_once_though_others_are_done_or_wait(how, text):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"(?s)rank 1:.*{text}"):
        run_ranks(fail_or_wait, 3, how)
    assert time.monotonic() - began < 60


def test_a_free_port_is_none_that_outgoing_connections_get():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        given = connection.getsockname()[1]
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 1
    assert max(ports) < given
    with socket.create_server(("127.0.0.1", ports.pop())):
        pass
