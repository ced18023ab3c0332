"""Stages compare digests of their calls at the end of a step; a difference is named."""

import pytest
import torch.distributed as dist

from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import PROGRAM
from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks


def compare(paths):
    rank = dist.get_rank()
    ledger = Ledger(probes=True).note(PROGRAM, "\n".join(paths[rank]))
    ledger.begin("the end of a step", dist.group.WORLD)
    try:
        ledger.check()
    except UnsupportedError as error:
        return str(error), ledger.is_alike()
    return "", ledger.is_alike()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("stages", [2, 3])
def test_equal_calls_are_agreed_on(stages):
    assert run_ranks(compare, stages, [["embed", "head"]] * stages) == [("", True)] * stages


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (["embed", "block"], "call 1 is `head` on rank 0, `block` on rank 1"),
        (["embed"], "call 1 is `head` on rank 0, `the end of the step` on rank 1"),
    ],
)
def test_the_first_call_that_differs_is_named_on_every_rank(other, told):
    for message, is_reached in run_ranks(compare, 2, [["embed", "head"], other]):
        assert told in message
        assert not is_reached
