"""When sharded units are gathered, freed and reduced.

A unit's parameters must be there while its function runs, which is called through here, and again while autograd
computes its gradients, which :mod:`smp_strategy.data_parallel.backward_tracking` finds out.

A unit is reduced when backward is through with all its calls of a token, a microbatch say. Gradients that come later,
and those of units of which a call has got no gradient, are reduced at the end of the pass.

**The order** of all this is the same on all ranks of the group, also where they take different paths
(:mod:`smp_strategy.data_parallel.collective_order`). It is known from the pass before, so units are gathered ahead, as
long as fewer than ``most_live`` elements are there. What is needed at once is gathered in any case.
"""

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.data_parallel.backward_tracking import BackwardTracker, TrackedCall
from smp_strategy.data_parallel.collective_order import CollectiveOrder, Operation
from smp_strategy.data_parallel.flat_unit import FlatUnit
from smp_strategy.data_parallel.replica_all_reduce import ReplicaAllReduce
from smp_strategy.data_parallel.saved_weights import is_in, weights_guarded
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.work import wait_for
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.model.trace.func_transforms import without_transforms
from smp_strategy.model.trace.pytree import flatten

__all__ = ["GatherPolicy", "GatherSchedule"]

_WITHOUT_SHARDING = (
    "Use `torch.autograd.grad(..., create_graph=True)` instead of the transform, or leave out "
    "`sharded_data_parallel_degree`."
)
# Gradients of more units are not kept in memory while they are being reduced.
MOST_REDUCING = 2


@final
@dataclass(frozen=True, kw_only=True)
class GatherPolicy:
    """When units are gathered and reduced."""

    gathers_once: bool = False
    """Gather all units, however many, when a pass begins, and keep them until it ends; not each for each use."""
    num_ahead: int = 1
    """How many units to gather ahead of their uses."""
    most_live: int | None = None
    """Number of elements (padding included, without those of small parameters that stay) up to which to gather ahead;
    ``None``: any."""
    reduces_early: bool = True
    """Reduce gradients as soon as they are there, once per microbatch, and not when a pass ends."""


@final
class GatherSchedule:
    """See the module docstring. All ranks of the group call :meth:`end_pass` equally often.

    Args:
        units: by name, in the same order on all ranks.
        collectives: those of the group.
        timing: when they are gathered and reduced.
        factor: what this rank's gradients are multiplied by when they are reduced.
        replicas: the collectives of the ranks that have the same shards in other shard groups, if there are any.
        deals_out: whether each of these ranks updates a part of the shards.

    Attributes:
        may_return_weights: whether units may return their weights: those stay as long as what is done with results.
        is_last: whether the last backward before the optimizer's step has begun: what is reduced from now on is
            probably final, and added up over the replicas. Until the end of the pass.
        live_numel: number of elements that are gathered now.
        most_numel: the highest number so far.
        most_bytes: the same in bytes.
    """

    def __init__(
        self,
        units: Mapping[str, FlatUnit],
        collectives: Collectives,
        *,
        timing: GatherPolicy = GatherPolicy(),
        factor: float = 1.0,
        replicas: Collectives | None = None,
        deals_out: bool = False,
    ) -> None:
        self.is_last = False
        self.may_return_weights = timing.gathers_once
        self.live_numel = self.most_numel = self._live_bytes = self.most_bytes = 0
        self._names = list(units)
        self._numbers = {name: number for number, name in enumerate(units)}
        self._units = list(units.values())
        self._numels = [unit.layout.transient_numel for unit in self._units]
        self._bytes = [unit.layout.transient_bytes for unit in self._units]
        if not timing.gathers_once:
            self._check_cap(timing.most_live)
        self._timing = timing
        self._factor = factor
        self._holds_all = False
        self._is_live = [False] * len(self._units)
        # How many uses of each unit are under way.
        self._claims = [0] * len(self._units)
        self._reducing: deque[int] = deque()
        self._sums = None
        if replicas is not None and replicas.size > 1:
            self._sums = ReplicaAllReduce(self._units, replicas, deals_out=deals_out)
        self._collectives = collectives
        self._order = CollectiveOrder(
            collectives,
            start=self._start,
            pass_by=self._pass_by,
            digest=lambda: zlib.crc32(bytes(is_trained for _, is_trained in self._are_trained())),
            refuse=self._refuse_different,
        )
        self._backwards = BackwardTracker(
            claim=self._claim, release=self._release, done=self._reduce_early, keeps_weights=timing.gathers_once
        )

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        token: object = None,
    ) -> Any:
        """TrackedCall ``function`` while the parameters of a unit are there, and see to it that backward finds them.

        Args:
            name: of the unit.
            function: what to call.
            args: its arguments.
            kwargs: its keyword arguments.
            token: equal for calls that one thread makes one after the other: those of a microbatch.
        """
        number = self._numbers[name]
        self._claim(number)
        try:
            memory = self._units[number].memory
            if not torch.is_grad_enabled():
                result = function(*args, **kwargs)
                self._results(name, memory, result)
                return result
            made_before = torch._C._autograd._get_sequence_nr()
            call = self._backwards.begin(number, token)
            with (
                without_transforms(f"`{name}`", "whose weights are spread over ranks", _WITHOUT_SHARDING),
                weights_guarded(memory, partial(self._guard, call)),
            ):
                result = function(*args, **kwargs)
            self._backwards.watch(call, self._results(name, memory, result), made_before)
            return result
        finally:
            self._release(number)

    def begin_pass(self) -> None:
        """If all units are gathered once, begin to; otherwise, and in the midst of a pass, nothing happens.

        By default the first call begins. Where a rank may have no call at all in a pass, and others wait for more than
        each other's units, this must come first. Collective.
        """
        if self._timing.gathers_once and not self._holds_all:
            self._holds_all = True
            for every in range(len(self._units)):
                self._gather(every)

    def begin_training(self) -> None:
        """A pass with backward begins, with the gradients that the units have by now."""
        if self._sums is not None:
            self._sums.begin_pass()

    def end_pass(self) -> None:
        """All calls of this pass, and all of its backwards, are through: a microbatch or a step, trained or not.

        Reduces what is left to reduce, on all ranks, and frees everything. Collective.
        """
        self._backwards.close()
        for number, unit in enumerate(self._units):
            if unit.has_gradients:
                self._order.request(Operation(number, "reduce"))
        if self._holds_all:
            self._holds_all = False
            for number in range(len(self._units)):
                self._release(number)
        self._order.end()
        assert not any(self._claims), "a pass has ended while units are in use"
        assert not self.live_numel, "a pass has ended and units are gathered"
        if self.is_last and self._sums is not None:
            self._sums.begin_rest()
        self.is_last = False

    def finish_sums(self) -> None:
        """Let the units' gradients be sums over the replicas, too; what is not begun yet begins now.

        Called once before each step of the optimizer, and after each pass whose last part was ``is_last``, also where
        its gradients are not wanted. Afterwards all units that are trained have gradients, zeros where no rank has
        used them. Collective.
        """
        if self._sums is not None:
            self._sums.finish()
            return
        for unit in self._units:
            shards, reducing = unit.take_gradients()
            wait_for(reducing)
            unit.put_gradients(shards)

    # What is under way

    def _claim(self, number: int) -> None:
        """Let a unit's parameters be there until they are released."""
        self.begin_pass()
        if not self._claims[number]:
            self._gather(number)
        else:
            self._claims[number] += 1
        self._prefetch()
        self._units[number].wait()

    def _gather(self, number: int) -> None:
        self._order.request(Operation(number, "gather"))
        self._claims[number] += 1

    def _release(self, number: int) -> None:
        self._claims[number] -= 1
        if not self._claims[number] and not self._order.is_ahead(Operation(number, "gather")):
            self._free(number)
            self._prefetch()

    def _prefetch(self) -> None:
        most_live = self._timing.most_live
        while self._order.num_ahead < self._timing.num_ahead:
            number = self._order.next_gather
            if number is None or self._is_live[number]:
                return
            if most_live is not None and self.live_numel + self._numels[number] > most_live:
                return
            self._order.start_ahead()

    def _reduce_early(self, number: int) -> None:
        if self._timing.reduces_early and self._units[number].has_gradients:
            self._order.request(Operation(number, "reduce"))
            self._prefetch()

    def _guard(self, call: TrackedCall) -> None:
        """A saved weight is about to be read."""
        if self._claims[call.unit]:
            return
        if torch._C._current_graph_task_id() == -1:
            raise UnsupportedError(
                f"A weight that `{self._names[call.unit]}` has saved for backward is read outside of a backward, but "
                "is not there: it is spread over ranks, and gathered for uses. Gather it once per step."
            )
        self._backwards.arrive(call)

    def _results(self, name: str, memory: list[range], result: Any) -> list[Tensor]:
        tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if not self.may_return_weights and is_in(memory, tensor):
                raise UnsupportedError(
                    f"`{name}` returns one of its weights, or a view of one, of shape {list(tensor.shape)}. Weights "
                    "are spread over ranks and are there during calls only. Return a clone, or gather them once per "
                    "step."
                )
        return tensors

    def _are_trained(self) -> list[tuple[str, bool]]:
        return [item for unit in self._units for item in unit.are_trained.items()]

    def _refuse_different(self) -> None:
        """Ranks have found that they do not train the same parameters."""
        names, are_trained = zip(*self._are_trained(), strict=True)
        mine = torch.tensor(are_trained, dtype=torch.uint8, device="cpu")
        everyones = mine.new_empty(self._collectives.size * len(mine))
        self._collectives.gather(everyones, mine).wait()
        first = int((everyones.view(-1, len(mine)) != mine).any(0).nonzero()[0])
        raise UnsupportedError(
            f"`{names[first]}` is frozen (`requires_grad`) on some ranks of its shard group "
            "(`sharded_data_parallel_degree`) and trained on others, but they hold it together. Freeze and unfreeze it "
            "on all ranks alike."
        )

    # Collectives

    def _start(self, operation: Operation) -> None:
        number = operation.unit
        unit = self._units[number]
        if operation.kind == "gather":
            unit.gather(anew=True)
            if not self._is_live[number]:
                self._is_live[number] = True
                self.live_numel += self._numels[number]
                self.most_numel = max(self.most_numel, self.live_numel)
                self._live_bytes += self._bytes[number]
                self.most_bytes = max(self.most_bytes, self._live_bytes)
            return
        if len(self._reducing) == MOST_REDUCING:
            self._wait_reduced(self._reducing.popleft())
        unit.reduce(self._factor)
        self._reducing.append(number)
        if self.is_last and self._sums is not None:
            self._sums.reduced(number)

    def _wait_reduced(self, number: int) -> None:
        if self._sums is None:
            self._units[number].wait_reduced()
        else:
            self._sums.wait_reduced(number)

    def _pass_by(self, operation: Operation) -> None:
        if operation.kind == "gather":
            if self._claims[operation.unit]:
                self._units[operation.unit].wait()
            else:
                self._free(operation.unit)

    def _free(self, number: int) -> None:
        if self._is_live[number]:
            self._is_live[number] = False
            self.live_numel -= self._numels[number]
            self._live_bytes -= self._bytes[number]
            self._units[number].free()

    def _check_cap(self, most_live: int | None) -> None:
        largest = max(self._numels, default=0)
        if most_live is not None and most_live < largest:
            name = self._names[self._numels.index(largest)]
            raise ConfigError(
                f"At most {most_live} elements may be gathered at a time (`sdp_max_live_parameters`), but the unit "
                f"`{name}` has {largest}. Allow at least as many, or make the units smaller."
            )
