"""Gradient reduction over stages and replicas: when gradients are summed, so that nothing is counted twice.

Gradients of parameters that several stages hold are summed over the stages, and all gradients are averaged over the
replicas, once between the last backward and whatever looks at them: clipping, hooks, the optimizer. A step that
accumulates by hand may do all this for some parameters and continue to add to the same gradients.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.bucketed_all_reduce import Bucket, BucketedAllReduce
from smp_strategy.data_parallel.buffer_sync import BufferSync, Notes
from smp_strategy.data_parallel.grad_norm import global_norm
from smp_strategy.data_parallel.gradient_sums import ReplicaSums, alike, may_be_sparse, sum_gradients
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.collectives.interface import JoinedSums

__all__ = ["Reduction"]


@final
class Reduction:
    """Sums over ranks that gradients still need.

    Args:
        holdings: Parameters of this rank. A shard group reduces the gradients of sharded ones in backward.
        dtype: Dtype in which gradients are sent between replicas; ``None``: that in which they are summed.
        keeps_buffers: Whether each replica keeps its own buffers.
        sums: Way to sum dense gradients over the replicas; ``None``: all-reduces of the backend.

    Attributes:
        buffers: Synchronisation of the replicas' buffers, which happens together with that of gradients.
    """

    def __init__(
        self,
        holdings: Holdings,
        dtype: torch.dtype | None = None,
        *,
        keeps_buffers: bool = False,
        sums: ReplicaSums | None = None,
    ) -> None:
        self._dtype = dtype
        self._sums = sums
        mesh, ownership, sharded = holdings.mesh, holdings.ownership, holdings.sharded
        replicas = mesh.dp_group if mesh.dp > 1 and not keeps_buffers else None
        self.buffers = BufferSync(ownership.local_modules(mesh.stage), replicas)
        self._holdings = holdings
        self._mesh = mesh
        self._sharding = holdings.zero
        self._sharded = sharded
        self._local = [parameter for parameter in holdings.parameters if not sharded.has(parameter)]
        # Local parameters that several stages hold, with the group of these stages.
        self._shared = [
            (group, [parameter for parameter in parameters if not sharded.has(parameter)])
            for stages, parameters in ownership.shared().items()
            if (group := mesh.group_of(stages)) is not None
        ]
        sparse = {
            parameter
            for module in ownership.local_modules(mesh.stage)
            if may_be_sparse(module)
            for parameter in module.parameters(recurse=False)
        }
        # Dense parameters of a single unit. Gradients of others come from several places.
        self._early = [
            parameter
            for units, members in ownership.parameters_by_units().items()
            for _, parameter in members
            if len(units) == 1 and ownership.stage_of[units[0]] == mesh.stage
            if not sharded.has(parameter) and parameter not in sparse
        ][::-1]
        # A frozenset keeps the hashes, so joining and comparing sets does not ask each parameter for its own.
        self._all_local = frozenset(self._local)
        self._pending: frozenset[nn.Parameter] = frozenset()
        self._quiet: Collection[nn.Parameter] = ()
        self._guesses = self._overlaps = True

    def describe(self) -> str:
        """Sentence about the way in which replicas sum gradients; empty without replicas, and if shards do."""
        if self._mesh.dp == 1 or self._mesh.shard_group is not None:
            return ""
        if self._sharding.drops_gradients:
            return "Each gradient is summed on the replica that updates its parameter."
        way = "by all-reduces of the backend" if self._sums is None else self._sums.way
        return f"Gradients of replicas are summed {way}."

    def start(self) -> BucketedAllReduce | None:
        """Begin an all-reduce that overlaps with the last backward of a step; ``None``: not possible."""
        parameters = [parameter for parameter in self._early if parameter.requires_grad]
        if self._mesh.dp == 1 or self._pending or not self._overlaps or not parameters:
            return None
        return BucketedAllReduce(
            self._buckets(parameters),
            self._mesh.sum_group,
            factor=1 / self._mesh.dp,
            quiet=self._quiet,
            dtype=self._dtype,
            joined=self._joined(),
        )

    def finish(self, sums: BucketedAllReduce) -> tuple[dict[nn.Parameter, Tensor], Notes]:
        """Wait for the averages of :meth:`start`. If some were sent too early, the next ones are sent later."""
        found, was_early, notes = sums.finish()
        if was_early and self._guesses:
            self._guesses = False
        elif was_early:
            self._overlaps = False
        self._quiet = sums.quiet if self._guesses else ()
        return found, notes

    def begin_backward(self, averaged: Collection[nn.Parameter] = ()) -> None:
        """Note that more gradients will be added, on every rank.

        Args:
            averaged: Parameters for which these are already averages over the replicas.
        """
        self.buffers.may_change()
        begun = self._all_local.difference(averaged)
        self._sharding.set_averages_aside(self._in_order(begun - self._pending))
        for _, parameters in self._shared:
            for parameter in parameters:
                if parameter not in self._pending and not self._holdings.is_first_here(parameter):
                    # The gradient is already a sum over the stages, and equal on all: only one may count it again.
                    parameter.grad = None
        self._pending |= begun
        self._sharded.begin_backward()

    def reduce(self, notes: Notes | None = None) -> None:
        """Sum all gradients to which something was added, and synchronise buffers. Collective.

        Args:
            notes: Maximum of the replicas' notes about buffers, if it is known.
        """
        self.reduce_some(self._pending)
        self.buffers.meet(notes)

    def reduce_some(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of ``parameters`` to which something was added. Collective."""
        self._sharded.sum_gradients(self._mesh.dp_group)
        wanted = self._pending.intersection(parameters)
        for group, members in self._shared:
            sum_gradients([parameter for parameter in members if parameter in wanted], group)
        mine = self._in_order(wanted)
        if self._mesh.dp > 1:
            sum_gradients(
                mine,
                self._mesh.sum_group,
                factor=1 / self._mesh.dp,
                dealt_out=self._buckets,
                dtype=self._dtype,
                joined=self._joined(),
            )
        self._sharding.put_averages_back(mine)
        self._pending = self._pending - wanted

    def over_replicas(self, value: Tensor) -> Tensor:
        """Mean of the replicas' ``value``. Collective."""
        if self._mesh.dp > 1:
            value = value.clone()
            collectives.reduce_numbers(value, group=self._mesh.dp_group, doing="the mean over replicas").wait()
            value.div_(self._mesh.dp)
        return value

    def norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Norm over the gradients of ``parameters``, the same list on every rank; see :func:`global_norm`."""
        groups = [self._mesh.pp_group, *([self._mesh.dp_group] if self._sharding.is_on else [])]
        pieces_on = self._mesh.dp_group if self._sharded.deals_out else self._mesh.shard_group
        mine, parts = self._holdings.is_counted_here, self._holdings.parts
        return global_norm(parameters, mine, groups, norm_type, parts, pieces_on=pieces_on)

    def close(self) -> None:
        """End the background threads."""
        if self._sums is not None:
            self._sums.close()

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        if self._sums is None or self._sharding.drops_gradients:
            return self._sharding.buckets(parameters)
        return alike(parameters, self._sums.bucket_bytes)

    def _joined(self) -> JoinedSums | None:
        return None if self._sums is None else self._sums.begin()

    def _in_order(self, wanted: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters in ``wanted`` that this rank holds by itself."""
        return self._local if wanted == self._all_local else [each for each in self._local if each in wanted]
