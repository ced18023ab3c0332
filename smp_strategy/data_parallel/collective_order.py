"""Collective order: ranks of a group start the same collectives in the same order, whatever their programs do.

The order is that of the pass before (a *plan*), so that units can be gathered ahead; where ranks deviate from it they
agree by small exchanges. The protocol is described in [Note: collective order] below.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import torch

from smp_strategy.distributed.collectives.interface import Collectives

__all__ = ["CollectiveOrder", "Operation", "Step", "plan_of"]

# [Note: collective order]
#
# Backends match collectives by their order, so ranks that start different ones, or the same in different orders, hang
# or corrupt each other's buffers. The collectives that a rank needs follow from its program, and programs may differ: a
# block is skipped for some samples, an expert is not chosen. To ask the others before each collective would cost a
# round trip each time and rule out gathering ahead. So ranks follow a plan. A pass goes like this on each rank:
#
#     1  first request, or the end      exchange of announcements; all look up the plan for this beginning
#     2  request that is next           is started
#     3  request farther down           all steps before it are started for the others, then it
#     4  request not in the plan        the rest of the plan is started; then rounds, one per request: exchange, start
#                                       what any rank asks for, by number
#     5  end                            as 4, until every rank is at its end
#
# Invariants:
#   * Every rank starts the same sequence: the whole plan, then the rounds. A rank enters a round only after it has
#     started the whole plan, so it never keeps a rank waiting that is still inside the plan.
#   * No deadlock within the group: a rank at its end serves the others (5), and starting an operation waits at most for
#     operations that stand earlier in the sequence.
#   * `key` and plans are equal on all ranks, because they are computed from exchanged words only.
#
# A pass that goes by the plan costs two exchanges of three numbers, 1 and 5. In the last round all learn by a digest
# whether they asked for the same; if so, these requests are the next plan. If not, the plan becomes everything that was
# started, in which the next pass of either kind finds its requests; one that is much longer than the requests of any
# rank is forgotten.
#
# Ranks that also wait for each other elsewhere (stages of a pipeline whose replicas take different paths) can deadlock
# in the rounds. They must ask for the same, or gather what they need before the pass.

_END = -1
# Longest plan that is kept, as a multiple of the number of requests of the busiest rank.
MOST_TIMES_LONGER = 3


class Operation(NamedTuple):
    """A collective of a unit."""

    unit: int
    kind: Literal["gather", "reduce"]


class Step(NamedTuple):
    """An operation of a plan."""

    operation: Operation
    uses: int
    """Number of consecutive requests that it serves."""


class _Announcement(NamedTuple):
    """Message of a rank to the others at its first request of a pass."""

    request: int
    has_graph: int
    digest: int


class _Word(NamedTuple):
    """Message of a rank to the others in a round."""

    request: int
    digest: int
    num_requests: int


@final
@dataclass(kw_only=True)
class _OrderedPass:
    """State of a pass, from the first request to the end."""

    key: Hashable
    plan: Sequence[Step]
    position: int = 0
    """Number of steps of the plan that have been started."""
    ahead: deque[Step] = field(default_factory=deque)
    """Steps that were started before their requests, which are still expected."""
    requests: list[Operation] = field(default_factory=list)
    done: list[Step] = field(default_factory=list)


@final
class CollectiveOrder:
    """Starts the collectives of a group in one order; see [Note: collective order].

    Ranks call :meth:`request` in the order of their own programs, and all call :meth:`end` once a pass.

    Args:
        collectives: Collectives of the group.
        start: Starts an operation.
        pass_by: Called for an operation that was started for others, or ahead, and that this rank does not need.
        digest: Digest of the state that must be equal on all ranks when a pass begins.
        refuse: Called on all ranks if the digests differ; raises.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        start: Callable[[Operation], None],
        pass_by: Callable[[Operation], None],
        digest: Callable[[], int],
        refuse: Callable[[], None],
    ) -> None:
        self._collectives = collectives
        self._start = start
        self._pass_by = pass_by
        self._digest = digest
        self._refuse = refuse
        self._plans: dict[Hashable, Sequence[Step]] = {}
        self._pass: _OrderedPass | None = None

    @property
    def next_gather(self) -> int | None:
        """Unit of the plan's next step, if that is a gather."""
        now = self._pass
        if now is None or now.position == len(now.plan):
            return None
        operation = now.plan[now.position].operation
        return operation.unit if operation.kind == "gather" else None

    @property
    def num_ahead(self) -> int:
        """Number of steps that were started ahead of their requests."""
        return 0 if self._pass is None else len(self._pass.ahead)

    def is_ahead(self, operation: Operation) -> bool:
        """Whether ``operation`` was started for a request that is still expected."""
        return self._pass is not None and any(step.operation == operation for step in self._pass.ahead)

    def start_ahead(self) -> None:
        """Start the next step of the plan before its request."""
        now = self._pass
        assert now is not None
        now.ahead.append(now.plan[now.position])
        self._carry_out(now)

    def request(self, operation: Operation) -> None:
        """Make sure that ``operation`` has been started when this returns, now or ahead of time."""
        now = self._opened(operation)
        now.requests.append(operation)
        if operation.kind == "gather":
            if self._took_ahead(now, operation):
                return
            # The program has left the plan, so what was started ahead may never be asked for and is not kept for that.
            self._give_up_ahead(now)
        # Only what is still to be started counts: a step that has gone by was for another request.
        steps = range(now.position, len(now.plan))
        place = next((place for place in steps if now.plan[place].operation == operation), None)
        if place is None:
            self._finish_plan(now)
            self._round(now, operation)
            return
        while now.position < place:
            self._carry_out_for_others(now)
        step = now.plan[place]
        self._carry_out(now)
        if step.uses > 1:  # the unit stays gathered for the requests that follow at once
            now.ahead.append(step._replace(uses=step.uses - 1))

    def end(self) -> None:
        """End the pass on this rank: start what the others still ask for, until all are at their end."""
        now = self._opened(None)
        self._finish_plan(now)
        words = self._round(now, None)
        while any(word.request != _END for word in words):
            words = self._round(now, None)
        self._plans[now.key] = _next_plan(now, words)
        self._pass = None

    def _opened(self, operation: Operation | None) -> _OrderedPass:
        if self._pass is None:
            beginning = _Announcement(_coded(operation), int(torch.is_grad_enabled()), self._digest())
            # Training, validation and passes of other paths begin differently on some rank and so have other plans.
            key = tuple(map(_Announcement._make, self._exchange(beginning)))
            if len({each.digest for each in key}) > 1:
                self._refuse()
            self._pass = _OrderedPass(key=key, plan=self._plans.get(key, ()))
        return self._pass

    def _took_ahead(self, now: _OrderedPass, operation: Operation) -> bool:
        if not self.is_ahead(operation):
            return False
        # Programs ask in the order of the plan, so what stands before it was skipped.
        while now.ahead[0].operation != operation:
            self._let_go(now.ahead.popleft().operation)
        step = now.ahead.popleft()
        if step.uses > 1:
            now.ahead.appendleft(step._replace(uses=step.uses - 1))
        return True

    def _give_up_ahead(self, now: _OrderedPass) -> None:
        while now.ahead:
            self._let_go(now.ahead.popleft().operation)

    def _finish_plan(self, now: _OrderedPass) -> None:
        self._give_up_ahead(now)
        while now.position < len(now.plan):
            self._carry_out_for_others(now)

    def _carry_out_for_others(self, now: _OrderedPass) -> None:
        operation = now.plan[now.position].operation
        self._carry_out(now)
        self._let_go(operation)

    def _carry_out(self, now: _OrderedPass) -> None:
        step = now.plan[now.position]
        now.position += 1
        now.done.append(step)
        self._start(step.operation)

    def _let_go(self, operation: Operation) -> None:
        # The same unit can be ahead a second time, for a later request.
        if not self.is_ahead(operation):
            self._pass_by(operation)

    def _round(self, now: _OrderedPass, operation: Operation | None) -> list[_Word]:
        """Exchange requests, and start what any rank asks for."""
        mine = _coded(operation)
        word = _Word(mine, hash(tuple(map(_coded, now.requests))), len(now.requests))
        words = list(map(_Word._make, self._exchange(word)))
        # Sorted, because all ranks must start them in one order, and each once, however many ask for it.
        for request in sorted({word.request for word in words} - {_END}):
            wanted = _decoded(request)
            now.done.append(Step(wanted, 1))
            self._start(wanted)
            if request != mine:
                self._let_go(wanted)
        return words

    def _exchange(self, word: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(word, dtype=torch.int64, device="cpu")
        words = mine.new_empty(self._collectives.size * len(word))
        self._collectives.gather(words, mine).wait()
        found: list[list[int]] = words.view(-1, len(word)).tolist()
        return found


def plan_of(operations: Iterable[Operation]) -> tuple[Step, ...]:
    """Plan of a pass that asks for ``operations``: consecutive gathers of a unit become one step with several uses."""
    plan: list[Step] = []
    for operation in operations:
        if plan and plan[-1].operation == operation and operation.kind == "gather":
            plan[-1] = Step(operation, plan[-1].uses + 1)
        else:
            plan.append(Step(operation, 1))
    return tuple(plan)


def _next_plan(now: _OrderedPass, words: Sequence[_Word]) -> Sequence[Step]:
    # From the words alone, which are equal on all ranks, and so is the decision.
    if len({word.digest for word in words}) == 1:
        return plan_of(now.requests)
    if len(now.done) > MOST_TIMES_LONGER * max(word.num_requests for word in words):
        return ()
    return tuple(now.done)


def _coded(operation: Operation | None) -> int:
    return _END if operation is None else 2 * operation.unit + (operation.kind == "reduce")


def _decoded(request: int) -> Operation:
    unit, is_reduce = divmod(request, 2)
    return Operation(unit, "reduce" if is_reduce else "gather")
