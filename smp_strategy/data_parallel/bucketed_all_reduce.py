"""Bucketed all-reduce of gradients, overlapped with backward: a bucket is sent when its last gradient is there.

Backward computes the gradients of the last layers first, so most buckets travel while the others are still computed.
Only the last backward pass of a step tells which gradients are final: there a parameter is complete once something was
added to its gradient, or before, if nothing will be; whether something will is guessed from the step before. A gradient
that gets several parts in that pass (a block that is recomputed twice, say), or for which the guess is wrong, may have
been sent too early. The ranks tell each other, and in that case all is sent again.

A parameter may have a gradient on one rank and none on another, which did not use it in this step. So each bucket is
followed by one flag per gradient: 1 if this rank has it, 0 if zeros were sent instead. A gradient that no rank has
stays ``None``, as in a single process.

Every rank sends all buckets, always in the same order, before its step ends. So the ranks' collectives match, whatever
happens afterwards.

A bucket is an all-reduce of the backend, or goes into joined sums
(:class:`~smp_strategy.distributed.collectives.interface.JoinedSums`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_unit import FlatUnit
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.collectives.interface import Collectives, JoinedSums
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.errors import SMPError
from smp_strategy.precision.dtypes import gradient_dtype
from smp_strategy.precision.master_weights import widened

__all__ = ["Bucket", "BucketedAllReduce", "ReplicaAllReduce"]


_SUMS = "sums of gradients"

Bucket = Sequence[Sequence[nn.Parameter]]
"""Parameters of one dtype: for each rank those whose sums it gets; a single list if all ranks get all sums."""


@final
class BucketedAllReduce:
    """Gradient sums of a single step.

    Args:
        buckets: At least one bucket, in the order in which backward probably completes them; the same on all ranks.
        group: Ranks to sum over.
        factor: Factor of the sums; one over the number of ranks for averages.
        quiet: Parameters to which the last backward pass probably adds nothing.
        dtype: Dtype in which gradients are sent; ``None``: that in which they are summed on each rank.
        joined: Sums for buckets of which all ranks get all sums; ``None``: all-reduces of the backend.

    Attributes:
        quiet: Parameters to which the last backward pass has added nothing.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        *,
        factor: float = 1.0,
        quiet: Collection[nn.Parameter] = (),
        dtype: torch.dtype | None = None,
        joined: JoinedSums | None = None,
    ) -> None:
        self._dtype = dtype
        self._joined = joined
        self._buckets = buckets
        self._group = group
        self._factor = factor
        # A row for each rank, or the sum of all, one row.
        self._sent: list[Handle[Tensor]] = []
        self._bucket_of = {
            parameter: number for number, bucket in enumerate(buckets) for share in bucket for parameter in share
        }
        self.quiet = set(self._bucket_of)
        self._missing: list[set[nn.Parameter]] = [set() for _ in buckets]
        for parameter, number in self._bucket_of.items():
            if parameter not in quiet:
                self._missing[number].add(parameter)
        self._said = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._asked: Handle[object] | None = None
        self._gradients: Mapping[nn.Parameter, Tensor] = {}

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        return self._bucket_of.keys()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the last backward pass: send each bucket when it is complete."""
        handles = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in self._bucket_of]
        self._send_complete()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def send_rest(self, notes: Sequence[int] = ()) -> None:
        """Send all other buckets, after backward. Call it on every rank in every step.

        Args:
            notes: Numbers of which all ranks get the maximum, equally many on each.
        """
        self._gradients = {each: each.grad for each in self._bucket_of if each.grad is not None}
        self._send_all(self._buckets[len(self._sent) :])
        if notes:
            self._said = torch.cat([self._said, torch.tensor(notes, dtype=torch.int32, device="cpu")])
        self._asked = collectives.all_reduce(self._said, dist.ReduceOp.MAX, group=self._group, doing=_SUMS)

    def finish(self) -> tuple[dict[nn.Parameter, Tensor], bool, list[int]]:
        """Wait for the sums.

        Returns:
            The sums that this rank gets, of parameters that have a gradient on some rank; whether some rank had sent
            too early; and the maximum of the ranks' notes.
        """
        if self._asked is None:
            raise SMPError("Sums are asked for before all gradients are sent off.")
        self._asked.wait()
        is_early, *notes = self._said.tolist()
        was_early = bool(is_early)
        if was_early:
            wait_for(self._sent)
            self._sent.clear()
            self._send_all(self._buckets)
        found: dict[nn.Parameter, Tensor] = {}
        for bucket, sent in zip(self._buckets, self._sent, strict=True):
            found.update(self._received(bucket, sent))
        self._sent.clear()
        self._gradients = {}
        return found, was_early, notes

    def _arrived(self, parameter: nn.Parameter) -> None:
        number = self._bucket_of[parameter]
        self.quiet.discard(parameter)
        if number < len(self._sent):
            # Sent without this part. Only noted: a collective now would not match those of the other ranks.
            self._said.fill_(1)
            return
        self._missing[number].discard(parameter)
        self._send_complete()

    def _send_complete(self) -> None:
        # In the order of the buckets, which is the same on all ranks, not in that in which they are complete.
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send(self._buckets[len(self._sent)])

    def _send_all(self, buckets: Iterable[Bucket]) -> None:
        """Send all buckets that are still to be sent."""
        for bucket in buckets:
            self._send(bucket)
        if self._joined is not None:
            self._joined.flush()

    def _send(self, bucket: Bucket) -> None:
        group, num_ranks = self._group, dist.get_world_size(self._group)
        pieces = [piece for share in bucket for piece in self._pieces(share)]
        if len(bucket) == 1 and self._joined is not None:
            dtype = self._dtype or gradient_dtype(bucket[0][0])
            self._sent.append(self._joined.add(pieces, dtype=dtype).then(lambda sums: sums[None]))
            return
        sent = torch.cat(pieces).to(dtype=self._dtype)
        if len(bucket) == 1:
            self._sent.append(collectives.all_reduce(sent, group=group, doing=_SUMS).then(lambda _: sent[None]))
            return
        sizes = [_size(share) for share in bucket]
        mine = sizes[dist.get_rank(group)]
        parts = sent.new_empty(num_ranks * mine)
        # Not a reduce-scatter: gloo makes an all-reduce of it, with three times the bytes.
        given = [mine] * num_ranks, sizes
        work = collectives.begin(
            _SUMS, group, lambda: dist.all_to_all_single(parts, sent, *given, group=group, async_op=True)
        )
        self._sent.append(work.then(lambda _: parts.view(num_ranks, mine)))

    def _pieces(self, share: Sequence[nn.Parameter]) -> Iterator[Tensor]:
        """Gradients, and a flag for each that tells whether it exists."""
        gradients = [self._gradient(parameter) for parameter in share]
        for parameter, gradient in zip(share, gradients, strict=True):
            yield _dense(parameter, gradient).reshape(-1)
        if share:
            exist = [0.0 if gradient is None else 1.0 for gradient in gradients]
            yield torch.tensor(exist, dtype=gradient_dtype(share[0]), device=share[0].device)

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        # Once backward is over, `.grad` is the caller's again.
        return parameter.grad if self._asked is None else self._gradients.get(parameter)

    def _received(self, bucket: Bucket, sent: Handle[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        share = bucket[0 if len(bucket) == 1 else dist.get_rank(self._group)]
        parts = sent.wait()
        parts = parts.to(gradient_dtype(share[0])) if share else parts
        total, *others = parts.unbind()
        for other in others:  # in the order of the ranks
            total.add_(other)
        *pieces, exist = total.split([*(parameter.numel() for parameter in share), len(share)])
        for parameter, piece, exists in zip(share, pieces, exist.tolist(), strict=True):
            if exists:
                # Into the memory of this rank's own, unless that has half precision.
                gradient = widened(parameter, _dense(parameter, self._gradients.get(parameter)))
                yield parameter, torch.mul(piece.view(parameter.shape), self._factor, out=gradient)


def _dense(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    """``gradient``, dense; zeros if there is none."""
    if gradient is None:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    # Some parts of it are dense: a single process adds these and gets a dense gradient, too.
    return gradient.to_dense() if gradient.layout == torch.sparse_coo else gradient


def _size(share: Sequence[nn.Parameter]) -> int:
    """Elements of a share: its gradients, and a flag for each."""
    return sum(parameter.numel() for parameter in share) + len(share)


# --- shards over replicas --------------------------------------------------------------------------------------------
# All-reduce of gradient shards over the replicas of a shard group, overlapped with backward.
#
# When a unit has been reduced for the last time before the optimizer's step, its shard is summed over the replicas.
# There is one group of replicas for each rank of the shard group. The ranks of such a group must start the same sums in
# the same order, but they are in different shard groups, and those may reduce in different orders, or not the same
# units.
#
# So each group has an **order** of its own, of all trained units. A unit's sum begins when the unit and all before it
# in the order have probably been reduced for the last time, and for the rest when the pass ends, with zeros where there
# are no gradients. All ranks start every sum once per step, whatever happens, so their collectives match. And no rank
# waits for a sum before its pass has ended, so no shard group waits for another one during a pass.
#
# *Probably*, because only the end of the pass tells. A unit counts as complete once it has been reduced as often during
# this last backward as during that of the step before, and at least once. From the moment its sum begins, the unit has
# no gradients, so later ones are kept apart. At the end all ranks tell each other which units have later ones; these
# are summed in the same way and added. They also tell when each unit was reduced, which determines the order for the
# next step: the earliest first, units that were not reduced during the last backward at the end.
#
# Either all ranks get all of a sum, or each one the part that it alone updates.


_NEVER = 2**31


class _Sum(NamedTuple):
    """Sum of the shards that a unit had, under way."""

    sums: list[Tensor]
    reduced: list[Handle[object]]
    added_up: list[Handle[object]]


@final
@dataclass(kw_only=True)
class _Step:
    """State between two steps of the optimizer."""

    counts: list[int]
    """Number of reductions of each unit in the last backward."""
    places: list[int]
    """Index of each unit's last reduction among all reductions."""
    sums: dict[int, _Sum] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Units that have been reduced after their sums had begun."""
    said: Handle[Tensor] | None = None
    """For each unit whether it is late on some rank, and the sum of the ranks' places."""


@final
class ReplicaAllReduce:
    """Sums the gradient shards of units over the replicas.

    Args:
        units: Units, in the same order on all ranks.
        replicas: Collectives of the ranks that have the same shards.
        deals_out: Whether each replica gets the sum of its own part only.
    """

    def __init__(self, units: Sequence[FlatUnit], replicas: Collectives, *, deals_out: bool = False) -> None:
        self._deals_out = deals_out
        self._units = units
        self._replicas = replicas
        self._order: list[int] = []
        self.begin_pass()
        self._usual_counts = [1] * len(units)
        self._step = self._new_step()

    def begin_pass(self) -> None:
        """Begin a pass with backward: units that are trained for the first time enter the order."""
        numbers = reversed(range(len(self._units)))
        self._order += [n for n in numbers if self._units[n].is_trained and n not in self._order]

    def reduced(self, number: int) -> None:
        """Note that a unit is being reduced, in the last backward or at the end of its pass."""
        step = self._step
        assert step.said is None, "the sums of the pass before are finished first"
        step.counts[number] += 1
        step.places[number] = sum(step.counts)
        if number in step.sums:
            step.late.add(number)
        while len(step.sums) < len(self._order):
            following = self._order[len(step.sums)]
            if step.counts[following] < self._usual_counts[following]:
                return
            self._begin(following)

    def wait_reduced(self, number: int) -> None:
        """Wait for gradients of a unit that are being reduced."""
        self._units[number].wait_reduced()
        if number in self._step.sums:
            wait_for(self._step.sums[number].reduced)

    def begin_rest(self) -> None:
        """Begin all sums that have not begun: no gradients will come."""
        step = self._step
        assert step.said is None, "the sums of the pass before are finished first"
        for number in self._order[len(step.sums) :]:
            self._begin(number)
        words = [[int(number in step.late), step.places[number]] for number in self._order]
        said = torch.tensor(words, dtype=torch.int64, device="cpu")
        step.said = self._replicas.all_reduce(said).then(lambda _: said)

    def finish(self) -> None:
        """Wait for the sums and set them as the units' gradients. Collective."""
        if self._step.said is None:
            self.begin_rest()
        step, self._step = self._step, self._new_step()
        assert step.said is not None
        words = dict(zip(self._order, step.said.wait().tolist(), strict=True))
        late = {number: self._sum_of(number) for number in self._order if words[number][0]}
        for number, now in step.sums.items():
            wait_for(now.added_up)
            if number in late:
                wait_for(late[number].added_up)
                torch._foreach_add_(now.sums, late[number].sums)
            self._units[number].put_gradients(now.sums)
        self._usual_counts = [max(count, 1) for count in step.counts]
        self._order.sort(key=lambda number: words[number][1])

    def _new_step(self) -> _Step:
        return _Step(counts=[0] * len(self._units), places=[_NEVER] * len(self._units))

    def _begin(self, number: int) -> None:
        self._step.sums[number] = self._sum_of(number)

    def _sum_of(self, number: int) -> _Sum:
        shards, reduced = self._units[number].take_gradients()
        # A unit's shards are sent together, so each waits for all reductions.
        if not self._deals_out:
            return _Sum(shards, reduced, [self._replicas.all_reduce(shard, reduced) for shard in shards])
        sums = [shard.new_empty(shard.numel() // self._replicas.size) for shard in shards]
        pairs = zip(shards, sums, strict=True)
        return _Sum(sums, reduced, [self._replicas.reduce(shard, own, reduced, is_first=True) for shard, own in pairs])
