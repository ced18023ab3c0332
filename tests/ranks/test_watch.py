"""Stages that do not run the same program are told so within seconds, whoever waits for whom."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from smp_strategy.distributed import deadlock as watch
from smp_strategy.errors import PeerFailedError, UnsupportedError
from smp_strategy.pipeline import microbatch_runner as turns
from smp_strategy.testing import run_ranks

from .step_runs import engine_for
from .steps import Net, batch


def this_rank() -> int:
    """That of the process; `dist.get_rank()` is that of the replica in a step."""
    return int(os.environ["RANK"])


def read_on(*ranks: int) -> Callable[[Net, Tensor], Tensor]:
    def step(net: Net, x: Tensor) -> Tensor:
        a, b, c, d = net.blocks
        h = b(a(x))
        early = h.sum()
        loss = d(c(h)).pow(2).mean()
        if this_rank() in ranks:
            float(early.detach()), float(loss.detach())
        return loss

    return step


def branch_on_the_rank(net: Net, x: Tensor) -> Tensor:
    h = x
    for block in net.blocks:
        h = block(h)
    return h.pow(2).mean() if this_rank() == 0 else h.abs().mean()


def skip_a_block(net: Net, x: Tensor) -> Tensor:
    h = x
    for number, block in enumerate(net.blocks):
        if not (number == 2 and this_rank() == 1):
            h = block(h)
    return h.pow(2).mean()


CASES: dict[str, Any] = {
    "rank 0 reads": read_on(0),
    "rank 1 reads": read_on(1),
    "branch": branch_on_the_rank,
    "skip": skip_a_block,
}


def differing(step: Any, begins_at: int, pp: int) -> tuple[str, float]:
    watch.PATIENCE_SECONDS = turns.PATIENCE_SECONDS = 0.5  # type: ignore[attr-defined]
    watch.PAUSE_SECONDS = turns.PAUSE_SECONDS = 0.2  # type: ignore[attr-defined]
    net = Net(lambda net, x: step(net, x))
    engine = engine_for(net, pp, skip_tracing=True, microbatches=2)
    start = time.monotonic()
    try:
        for number in range(begins_at + 1):
            net.step = (lambda net, x: step(net, x)) if number == begins_at else read_on()
            engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss)
    except (UnsupportedError, PeerFailedError) as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("begins_at", [0, 2])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_that_run_different_code_are_told_so_soon(name, pp, begins_at):
    found = run_ranks(differing, pp, CASES[name], begins_at, pp)
    assert all(seconds < 20 for _, seconds in found)
    assert any("must run the same code" in message or "did not run the same code" in message for message, _ in found)
    for message, _ in found:
        assert "same code" in message or "rank" in message, message
