"""Gather schedule: when the parameters of sharded units are all-gathered, freed and reduce-scattered.

A unit's parameters must be there while its function runs, which is called through :meth:`GatherSchedule.call`, and
again while autograd computes its gradients (:mod:`smp_strategy.data_parallel.backward_tracking`). See
[Note: gather schedule].
"""

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.data_parallel.backward_tracking import BackwardTracker, TrackedCall, is_in, weights_guarded
from smp_strategy.data_parallel.bucketed_all_reduce import ReplicaAllReduce
from smp_strategy.data_parallel.collective_order import CollectiveOrder, Operation
from smp_strategy.data_parallel.flat_unit import FlatUnit
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import wait_for
from smp_strategy.distributed.torch_private import is_in_backward, sequence_number
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.model.trace.pytree import flatten_result
from smp_strategy.model.trace.saved_tensors import without_transforms

__all__ = ["GatherPolicy", "GatherSchedule"]

_WITHOUT_SHARDING = (
    "Use `torch.autograd.grad(..., create_graph=True)` instead of the transform, or leave out "
    "`sharded_data_parallel_degree`."
)
# Units whose full gradients are in memory while they are being reduced.
MOST_REDUCING = 2

# [Note: gather schedule]
#
# Every use of a unit, forward or backward, is a claim:
#
#     _claim     gather, unless another claim holds the unit; prefetch; wait for the values
#     _release   the last claim frees the unit, unless the plan needs it next; then prefetch
#
# Claims overlap: a unit is called inside itself, microbatches are interleaved, the backward of one call begins while
# another call runs. So they are counted, and only the first gathers and only the last frees.
#
# `_gather` and `_reduce_early` do not start collectives: they request them from the `CollectiveOrder`, which starts the
# same ones on all ranks ([Note: collective order]). It may do more than was asked: start operations for other ranks, or
# ahead. It tells by `_start` what it has started, and by `_pass_by` what this rank does not need of that. So `_is_live`
# and the counters of live elements follow `_start` and `_free`, not requests.
#
# Reduction: a unit is reduced when backward is through with all its calls of a token (a microbatch, say). Gradients
# that come later, and those of units of which a call got no gradient, are reduced in `end_pass`.


@final
@dataclass(frozen=True, kw_only=True)
class GatherPolicy:
    """When units are gathered and reduced."""

    gathers_once: bool = False
    """Gather all units when a pass begins and keep them until it ends, instead of each for each use."""
    num_ahead: int = 1
    """Number of units to gather ahead of their uses."""
    most_live: int | None = None
    """Limit of gathered elements for gathers ahead (with padding, without small parameters that stay gathered);
    ``None``: no limit."""
    reduces_early: bool = True
    """Reduce gradients as soon as they are complete, once per microbatch, instead of at the end of a pass."""


@final
class GatherSchedule:
    """Gathers, frees and reduces the units of a shard group. All its ranks call :meth:`end_pass` equally often.

    Args:
        units: Units by name, in the same order on all ranks.
        collectives: Collectives of the shard group.
        timing: When units are gathered and reduced.
        factor: Factor that gradients are multiplied by when they are reduced, the same on all ranks.
        replicas: Collectives of the ranks that hold the same shards in other shard groups; ``None``: there are none.
        deals_out: Whether each of these ranks updates a part of the shards.

    Attributes:
        may_return_weights: Whether units may return their weights, which is safe if they stay gathered for the pass.
        is_last: Whether the last backward before the optimizer's step has begun: gradients that are reduced from now
            on are probably final, and are summed over the replicas. Reset at the end of the pass.
        live_numel: Number of elements gathered now.
        most_numel: Peak of ``live_numel``.
        most_bytes: The same peak in bytes.
        seconds_waited: How long the host has waited for gathered values so far.
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
        self.seconds_waited = 0.0
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
        # Number of uses of each unit that are under way.
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
        """Call ``function`` with the parameters of a unit gathered, and again for its backward.

        Args:
            name: Name of the unit.
            function: Function to call.
            args: Its arguments.
            kwargs: Its keyword arguments.
            token: Equal for calls that a single thread makes in sequence: those of a microbatch.
        """
        number = self._numbers[name]
        self._claim(number)
        try:
            memory = self._units[number].memory
            if not torch.is_grad_enabled():
                result = function(*args, **kwargs)
                self._results(name, memory, result)
                return result
            made_before = sequence_number()
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
        """Begin to gather all units, if that is done once per pass; no effect otherwise, or in the middle of a pass.

        By default the first call of a unit does this. It must be called before if a rank may call no unit in a pass
        while other ranks also wait for each other elsewhere. Collective.
        """
        if self._timing.gathers_once and not self._holds_all:
            self._holds_all = True
            for every in range(len(self._units)):
                self._gather(every)

    def begin_training(self) -> None:
        """Begin a pass with backward; gradients that the units have by now are kept."""
        if self._sums is not None:
            self._sums.begin_pass()

    def end_pass(self) -> None:
        """End a pass (a microbatch or a step, trained or not) after all its calls and backwards.

        Reduces the remaining gradients and frees all units. Collective.
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
        """Sum the units' gradients over the replicas; sums that have not begun begin now.

        Call once before every optimizer step, and after every pass that ended with ``is_last`` set, even if its
        gradients will be discarded. Afterwards every trained unit has gradients, zeros if no rank used it. Collective.
        """
        if self._sums is not None:
            self._sums.finish()
            return
        for unit in self._units:
            shards, reducing = unit.take_gradients()
            wait_for(reducing)
            unit.put_gradients(shards)

    # Uses

    def _claim(self, number: int) -> None:
        """Gather a unit's parameters until :meth:`_release`; see [Note: gather schedule]."""
        self.begin_pass()
        if not self._claims[number]:
            self._gather(number)
        else:
            self._claims[number] += 1
        # Before the wait, so that the next unit already travels while this rank waits, and later computes.
        self._prefetch()
        began = perf_counter()
        self._units[number].wait()
        self.seconds_waited += perf_counter() - began

    def _gather(self, number: int) -> None:
        self._order.request(Operation(number, "gather"))
        self._claims[number] += 1

    def _release(self, number: int) -> None:
        self._claims[number] -= 1
        # A unit that the plan uses next (the last block, whose backward follows its forward) stays: its next request
        # will be served without a collective, so values that are freed now would not come back.
        if not self._claims[number] and not self._order.is_ahead(Operation(number, "gather")):
            self._free(number)
            # Its memory may be what the next gather ahead waits for (`most_live`).
            self._prefetch()

    def _prefetch(self) -> None:
        """Start gathers ahead of their requests. Ranks may differ in when they do, but not in the order."""
        most_live = self._timing.most_live
        while self._order.num_ahead < self._timing.num_ahead:
            number = self._order.next_gather
            # A reduction that is next has no gradients before its request, and gathers must not overtake it.
            # A live unit would be gathered into memory that is in use.
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
        """Called before a saved weight is read: make sure that it is there."""
        if self._claims[call.unit]:
            return
        if not is_in_backward():
            raise UnsupportedError(
                f"A weight that `{self._names[call.unit]}` has saved for backward is read outside of a backward, but "
                "is not there: it is spread over ranks, and gathered for uses. Gather it once per step."
            )
        self._backwards.arrive(call)

    def _results(self, name: str, memory: list[range], result: Any) -> list[Tensor]:
        tensors = [leaf for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor)]
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
        """Raise the error about a parameter that only some ranks train."""
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
            # Even if the unit is still gathered here: on another rank it may not be.
            unit.gather(again=True)
            if not self._is_live[number]:
                self._is_live[number] = True
                self.live_numel += self._numels[number]
                self.most_numel = max(self.most_numel, self.live_numel)
                self._live_bytes += self._bytes[number]
                self.most_bytes = max(self.most_bytes, self._live_bytes)
            return
        # Full gradients live until they are reduced; without the limit a fast backward would pile them up.
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
            # In use here: the same values are written to its memory again, which must be over before it is freed.
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
