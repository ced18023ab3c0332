"""Ranks whose programs differ at random start the same collectives in the same order, and none waits for ever."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from smp_strategy.data_parallel.collective_order import MOST_TIMES_LONGER, CollectiveOrder, Operation, Step, plan_of
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.testing import run_ranks

NUM_UNITS, PASSES = 5, 12


class Report(NamedTuple):
    started: list[list[Operation]]
    wanted: list[list[Operation]]
    exchanges: list[int]


class Watched(GlooCollectives):
    """Counts exchanges."""

    num_gathers = 0

    def gather(self, full: Any, shard: Any) -> Any:
        self.num_gathers += 1
        return super().gather(full, shard)


def program(kind: str, turn: int, rank: int) -> list[Operation]:
    """What a rank asks for in a pass."""
    draw = random.Random(f"{kind} {turn} {rank if kind != 'joint' else 0}")
    gather = [Operation(unit, "gather") for unit in range(NUM_UNITS)]
    reduce = [Operation(unit, "reduce") for unit in range(NUM_UNITS)]
    if kind == "same":
        return [*gather, *gather[::-1], *reduce[::-1]]
    if kind == "skipping":
        kept = [operation for operation in gather if draw.random() < 0.7]
        return [*kept, *kept[::-1], *[Operation(operation.unit, "reduce") for operation in kept[::-1]]]
    return draw.choices([*gather, *reduce], k=draw.randrange(15))


def follow(kind: str, ahead: int) -> Report:
    group = dist.new_group(list(range(dist.get_world_size())))
    collectives = Watched(group)
    now: list[Operation] = []
    ready: set[int] = set()

    def start(operation: Operation) -> None:
        now.append(operation)
        if operation.kind == "gather":
            ready.add(operation.unit)

    def pass_by(operation: Operation) -> None:
        if operation.kind == "gather":
            ready.discard(operation.unit)

    order = CollectiveOrder(collectives, start=start, pass_by=pass_by, digest=int, refuse=pytest.fail)
    report = Report([], [], [])
    for turn in range(PASSES):
        wanted = program(kind, turn, dist.get_rank())
        before = collectives.num_gathers
        for operation in wanted:
            order.request(operation)
            if operation.kind == "gather":
                assert operation.unit in ready, "what was asked for is not there"
                if not order.is_ahead(operation):
                    ready.discard(operation.unit)
            while order.num_ahead < ahead and order.next_gather is not None and order.next_gather not in ready:
                order.start_ahead()
        order.end()
        assert not ready, "something stays gathered"
        report.started.append(now[:])
        report.wanted.append(wanted)
        report.exchanges.append(collectives.num_gathers - before)
        now.clear()
    return report


def holds(started: Sequence[Operation], wanted: Sequence[Operation]) -> bool:
    """Whether ``wanted`` is a part of ``started``, in its order; a gather can serve several uses in a row."""
    rest = iter(started)
    return all(any(operation == step.operation for operation in rest) for step in plan_of(wanted))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("kind", ["same", "joint", "skipping", "wild"])
def test_whatever_ranks_ask_for_all_do_the_same(kind, ahead):
    reports = run_ranks(follow, 3, kind, ahead)
    for report in reports:
        assert report.started == reports[0].started
        for started, wanted in zip(report.started, report.wanted, strict=True):
            assert holds(started, wanted)


def test_in_steady_state_ranks_meet_at_the_beginning_and_at_the_end_only():
    for report in run_ranks(follow, 2, "same", 1):
        first, *others = report.exchanges
        assert first == 3 * NUM_UNITS + 2
        assert others == [2] * (PASSES - 1)
        assert report.started[1:] == [[step.operation for step in plan_of(report.wanted[0])]] * (PASSES - 1)


def test_plans_of_ranks_that_differ_do_not_grow_for_ever():
    reports = run_ranks(follow, 3, "wild", 0)
    longest = max(len(wanted) for report in reports for wanted in report.wanted)
    # What a pass does beyond its plan is what its ranks ask for.
    assert max(len(started) for started in reports[0].started) <= (MOST_TIMES_LONGER + 3) * longest


def test_what_is_gathered_twice_in_a_row_stays_in_between():
    one, other, reduce = Operation(1, "gather"), Operation(2, "gather"), Operation(2, "reduce")
    assert plan_of([one, other, other, reduce, other]) == (
        Step(one, 1),
        Step(other, 2),
        Step(reduce, 1),
        Step(other, 1),
    )
