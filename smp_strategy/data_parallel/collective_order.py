"""One order of collectives for all ranks of a group, whatever their programs do.

Ranks of a group must start the same collectives in the same order. What a rank needs, and when, follows from its
program, and programs may differ: a block is skipped for some samples, an expert is not chosen. Asking the others
before each collective would cost a round trip and gathering ahead would be impossible. So ranks follow a *plan*: the
order of the pass before. A pass goes like this on each rank::

    the first request, or the end      all tell each other how they begin, and look up the plan for this beginning
    a request that is next in the plan                          is carried out
    a request farther down             so is all before it, for the others
    a request that the plan lacks      so is all that is left of the plan; then, in rounds, what any rank asks for
    the end                            likewise, until all have come to their end

In each row all ranks do the same in the same order, and none waits for another that waits for it: a rank that has come
to its end serves the others. What differs is time only. The rounds are exchanges of three numbers, of which a pass
that goes by the plan has two: one at the beginning and one at the end, where all learn whether they have asked for the
same. If so, that is the next plan. If not, everything that was carried out is, which the next pass of either kind finds
in it; a plan that has become much longer than what ranks ask for is forgotten.

Ranks that wait for each other elsewhere, too (stages of a pipeline whose replicas take different paths), can block each
other in the rounds. They must ask for the same, or gather what they need before the pass.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import torch

from smp_strategy.distributed.collectives.interface import Collectives

__all__ = ["CollectiveOrder", "Operation", "Step", "plan_of"]

_END = -1
# How much longer a plan may be than what the busiest rank asks for.
MOST_TIMES_LONGER = 3


class Operation(NamedTuple):
    """A collective of a unit."""

    unit: int
    kind: Literal["gather", "reduce"]


class Step(NamedTuple):
    """Of a plan."""

    operation: Operation
    uses: int
    """How many requests one after the other it serves."""


class _Announcement(NamedTuple):
    """What a rank tells the others before a pass."""

    request: int
    has_graph: int
    digest: int


class _Word(NamedTuple):
    """What a rank tells the others in a round."""

    request: int
    digest: int
    num_requests: int


@final
@dataclass(kw_only=True)
class _OrderedPass:
    """What has happened between a first request and the end."""

    key: Hashable
    plan: Sequence[Step]
    position: int = 0
    """How far the plan has been carried out."""
    ahead: deque[Step] = field(default_factory=deque)
    """Gathers that were carried out, for requests that are still expected."""
    requests: list[Operation] = field(default_factory=list)
    done: list[Step] = field(default_factory=list)


@final
class CollectiveOrder:
    """See the module docstring. All methods are called by all ranks, in whatever order their programs have.

    Args:
        collectives: those of the group.
        start: starts a collective.
        pass_by: is told of a collective that was started for others, or ahead, and that this rank does not need.
        digest: of what must be the same on all ranks when a pass begins.
        refuse: called on all ranks where it is not; raises.
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
        """The unit that the plan gathers next, if it does nothing else before."""
        now = self._pass
        if now is None or now.position == len(now.plan):
            return None
        operation = now.plan[now.position].operation
        return operation.unit if operation.kind == "gather" else None

    @property
    def num_ahead(self) -> int:
        """How many gathers have been started ahead of their requests."""
        return 0 if self._pass is None else len(self._pass.ahead)

    def is_ahead(self, operation: Operation) -> bool:
        """Whether ``operation`` has been carried out for a request that is still expected."""
        return self._pass is not None and any(step.operation == operation for step in self._pass.ahead)

    def start_ahead(self) -> None:
        """Carry out the next step of the plan before it is asked for."""
        now = self._pass
        assert now is not None
        now.ahead.append(now.plan[now.position])
        self._carry_out(now)

    def request(self, operation: Operation) -> None:
        """Have ``operation`` carried out: when this returns it has been started, now or ahead of time."""
        now = self._opened(operation)
        now.requests.append(operation)
        if operation.kind == "gather":
            if self._took_ahead(now, operation):
                return
            self._give_up_ahead(now)
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
        if step.uses > 1:
            now.ahead.append(step._replace(uses=step.uses - 1))

    def end(self) -> None:
        """This rank asks for nothing more in this pass; do what others still ask for."""
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
            key = tuple(map(_Announcement._make, self._exchange(beginning)))
            if len({each.digest for each in key}) > 1:
                self._refuse()
            self._pass = _OrderedPass(key=key, plan=self._plans.get(key, ()))
        return self._pass

    def _took_ahead(self, now: _OrderedPass, operation: Operation) -> bool:
        if not self.is_ahead(operation):
            return False
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
        if not self.is_ahead(operation):
            self._pass_by(operation)

    def _round(self, now: _OrderedPass, operation: Operation | None) -> list[_Word]:
        """Carry out what any rank asks for."""
        mine = _coded(operation)
        word = _Word(mine, hash(tuple(map(_coded, now.requests))), len(now.requests))
        words = list(map(_Word._make, self._exchange(word)))
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
    """The plan for a pass that asks for ``operations``: what is gathered twice in a row stays in between."""
    plan: list[Step] = []
    for operation in operations:
        if plan and plan[-1].operation == operation and operation.kind == "gather":
            plan[-1] = Step(operation, plan[-1].uses + 1)
        else:
            plan.append(Step(operation, 1))
    return tuple(plan)


def _next_plan(now: _OrderedPass, words: Sequence[_Word]) -> Sequence[Step]:
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
