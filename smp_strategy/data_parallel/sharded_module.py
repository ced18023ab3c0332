"""Sharded module: the units of a stage with their parameters sharded over a shard group, as the engine uses them.

Each parameter is in one :class:`~smp_strategy.data_parallel.flat_unit.FlatUnit`: the parameters that belong to a single
unit make up one, those that the same several units share another, which is gathered for each of them. Between passes
over the model all of them rest, and ``.grad`` is this rank's piece
(:class:`~smp_strategy.data_parallel.parameter_pieces.ShardedGradient`).

Gradients are summed over the shard group during backward, as soon as they are complete, and divided by its size. They
are summed once per optimizer step over other shard groups (the replicas of the group), and over other stages that hold
the same parameter (MiCS; Zhang et al. 2022, section 3.4). So gradients that are summed already, and to which more is
added, stay right if they are averaged over the replicas again.

Replicas of a shard group either all update their shards alike, or they **deal them out**: each updates a part of its
shard and broadcasts it. A reduction to the owners with half of the bytes replaces the all-reduce of the gradients; the
new values are the other half. They travel while the next forward computes earlier units, so that a slow link is used
all the time, and optimizer state takes less memory. Pieces, their gradients and their state are then distributed over
the shard group and its replicas together; units are still gathered and reduced within the shard group. Gradients are
summed in every pass of several that accumulate.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_buffer import FlatBuffer
from smp_strategy.data_parallel.flat_unit import FlatUnit, ShardPolicy
from smp_strategy.data_parallel.gather_schedule import GatherPolicy, GatherSchedule
from smp_strategy.data_parallel.parameter_pieces import RestingGuard, ShardedGradient
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.collectives.interface import Collectives, LoneCollectives
from smp_strategy.errors import UnsupportedError

__all__ = ["ShardedModule"]


@final
class ShardedModule:
    """Sharded units of a stage. From its construction on the parameters rest.

    Args:
        parameters: Parameters to shard, with their names, by the units that have them; the same on all ranks of a
            stage.
        shards: Collectives of the shard group.
        replicas: Collectives of the ranks with the same shards, if there are several.
        device: Device of the parameters.
        across: For those keys of ``parameters`` that include units of other stages: the group of the ranks that have
            the same pieces on all of these stages, and whether this stage is the first of them.
        keeping: Policy of sharding.
        timing: When units are gathered and reduced.
        deals_out: Whether each replica updates a part of its shards and broadcasts it.

    Attributes:
        units: Units by name.
        group: Ranks that compare whether they are in the same hook, before it sees whole weights; ``None``: none do.
        deals_out: As given. If set, pieces are those of the shard group and its replicas together.
    """

    def __init__(
        self,
        parameters: Mapping[tuple[str, ...], Iterable[tuple[str, nn.Parameter]]],
        shards: Collectives,
        replicas: Collectives | None,
        device: torch.device,
        *,
        timing: GatherPolicy,
        across: Mapping[tuple[str, ...], tuple[dist.ProcessGroup, bool]] = MappingProxyType({}),
        keeping: ShardPolicy | None = None,
        deals_out: bool = False,
    ) -> None:
        assert replicas is not None or not deals_out
        owners = replicas if deals_out else None
        self._guard = RestingGuard()
        self.units = {
            "+".join(users): FlatUnit(members, shards, device, keeping=keeping, owners=owners, guard=self._guard)
            for users, members in parameters.items()
        }
        self._parts: dict[str, list[str]] = {}
        for users in parameters:
            for user in users:
                self._parts.setdefault(user, []).append("+".join(users))
        self._unit_of = {each: unit for unit in self.units.values() for each in unit.parameters}
        self._places = {each: place for unit in self.units.values() for each, place in unit.places()}
        self._shards = shards
        self.group: dist.ProcessGroup | None = None
        self._replicas = replicas
        self.deals_out = deals_out
        self._uses = GatherSchedule(
            self.units,
            shards,
            timing=timing,
            factor=1 / (shards.size * (1 if owners is None else owners.size)),
            replicas=replicas,
            deals_out=deals_out,
        )
        self._across = {"+".join(users): found for users, found in across.items()}
        self._is_final = True
        self._has_sums = False
        self._is_whole = False
        self._in_pieces: list[FlatUnit] = []
        self._is_open = False
        self._has_failed = False
        # Stops since the ranks have last compared them.
        self._stops: list[str] = []

    @classmethod
    def none(cls) -> Self:
        """No sharded units: all answers are those of whole parameters, and nothing is sent."""
        return cls({}, LoneCollectives(), None, torch.device("cpu"), timing=GatherPolicy())

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._unit_of)

    @property
    def held_bytes(self) -> int:
        """Bytes of values that this rank holds now."""
        return sum(unit.held_bytes for unit in self.units.values())

    @property
    def most_gathered_bytes(self) -> int:
        """Peak bytes of values that were gathered for passes and freed again."""
        return self._uses.most_bytes

    @property
    def seconds_waited(self) -> float:
        """Seconds that the host has waited for gathered values so far."""
        return self._uses.seconds_waited

    @property
    def is_whole(self) -> bool:
        """Whether every parameter and gradient is whole now, for user code."""
        return self._is_whole or self._is_alone

    @property
    def _is_alone(self) -> bool:
        """Whether this rank shares nothing with others."""
        return self._shards.size == 1

    def has(self, parameter: Tensor) -> bool:
        return parameter in self._unit_of

    # Passes over the model

    def call(self, name: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
        """Wrap ``function``, which calls the unit ``name``, so that its parameters are gathered.

        Args:
            name: Name of the unit.
            function: Function to call.
            token: Equal for calls that a single thread makes in sequence: those of a microbatch.
        """
        if self._guard.make_whole is not None:
            self._guard.make_whole()
        for part in () if self._is_whole else self._parts.get(name, ()):
            function = partial(self._call, part, function, token)
        return function

    def _call(self, part: str, function: Callable[..., Any], token: object, *args: Any, **kwargs: Any) -> Any:
        return self._uses.call(part, function, args, kwargs, token)

    @contextmanager
    def training(self, *, sums: bool) -> Iterator[None]:
        """Context of a pass with backward: gradients are added to those that the parameters have. Collective.

        Args:
            sums: Whether to sum them over the replicas as well, beginning with :meth:`around_last`.
        """
        with self._unless_it_fails():
            for unit in self.units.values():
                unit.begin_gradients()
            self._uses.begin_training()
            self._uses.begin_pass()
            yield
            self._uses.is_last = sums
            self.end_pass()
            self._has_sums = sums or self.deals_out
            if self._has_sums:
                self._finish_sums()
            for unit in self.units.values():
                unit.end_gradients()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of a pass without backward. Collective."""
        with self._unless_it_fails():
            self._uses.begin_pass()
            yield
            self.end_pass()

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Note a pass that an exception ends; if all ranks continue after it, the next pass ends it first."""
        self._end_failed()
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    def _end_failed(self) -> None:
        """If a pass has failed, finish its collectives and drop its gradients. Collective."""
        if self._has_failed:
            self._has_failed = False
            self._stops.clear()
            self._uses.end_pass()
            self._uses.finish_sums()

    @contextmanager
    def around_last(self) -> Iterator[None]:
        """Context of the last backward of a pass that sums over the replicas."""
        self._uses.is_last = True
        yield

    def begin_pass(self) -> None:
        """Begin or resume a pass of code that stops (:meth:`stop_at`) while it still has graphs.

        The pass ends when a backward inside of :meth:`training` has ended, by :meth:`let_go`, or by :meth:`end_pass`.
        Weights that graphs have saved by then are gathered again when they are read, or an error tells that they have
        changed.
        """
        self._end_failed()
        self._is_open = True
        self._uses.may_return_weights = False

    def end_pass(self) -> None:
        """End a pass: nothing stays gathered. Collective."""
        self._uses.end_pass()
        if self._is_open:
            self._is_open = False
            self._agree_on_stops()

    def stop_at(self, place: str) -> None:
        """Note that code stops at ``place``; ranks that stop elsewhere get an error at the end of the pass."""
        self._stops.append(place)

    def let_go(self) -> None:
        """End the pass that :meth:`begin_pass` has begun, if any, and one that has failed. Collective.

        Call it before values are shown, which makes gathered ones out of date, and before any other collective, which
        ranks that still gather would not reach.
        """
        self._end_failed()
        if self._is_open:
            self.end_pass()

    def _agree_on_stops(self) -> None:
        stops, self._stops = self._stops, []
        mine = torch.tensor([zlib.crc32("\n".join(stops).encode())], device="cpu")
        everyones = mine.new_empty(self._shards.size)
        self._shards.gather(everyones, mine).wait()
        if (everyones != mine).any():
            raise UnsupportedError(
                f"This rank is at {stops[-1]}, and other ranks of its shard group "
                "(`sharded_data_parallel_degree`) are elsewhere: their samples have led them to another path through "
                "the step. Weights are spread over these ranks, so they must do it together. Decide on something that "
                "is the same on all ranks (`batch_idx`, a number that was averaged over them)."
            )

    # Gradients

    def begin_backward(self) -> None:
        """Note that more will be added to the gradients, by each shard group and on each stage."""
        for name, (_, is_first) in self._across.items():
            if self._is_final and not is_first:
                # The gradient is already a sum over the stages, and equal on all: only one may count it again.
                for parameter in self.units[name].parameters:
                    parameter.grad = None
        # If something was added that is not summed yet, all is averaged once more.
        self._has_sums = self._has_sums and self._is_final
        self._is_final = self._is_alone

    def sum_gradients(self, group: dist.ProcessGroup) -> None:
        """Average the gradients over the replicas, if anything was added. Collective.

        Args:
            group: All ranks of this stage (the shard group and its replicas). They agree on the parameters that any of
                them has used, and drop the gradients of the others, as a single process has none.
        """
        self.let_go()
        if self._is_final:
            return
        self._is_final = True
        is_used = self._agree_on_use(group)
        if not self._has_sums or self._across:
            self._sum_between_passes()
        for parameter, here in zip(self._unit_of, is_used, strict=True):
            if not here:
                parameter.grad = None
            elif isinstance(parameter.grad, ShardedGradient):
                parameter.grad.is_used = True

    def _sum_between_passes(self) -> None:
        for unit in self.units.values():
            unit.begin_gradients()
        if not self._has_sums and not self.deals_out:
            self._finish_sums()
        for name, (stages, _) in self._across.items():
            for shard in self.units[name].gradient_shards:
                collectives.all_reduce(shard, group=stages, doing="gradients of other stages").wait()
        for unit in self.units.values():
            unit.end_gradients()

    def _agree_on_use(self, group: dist.ProcessGroup) -> list[bool]:
        """Whether any rank of its stages has used each parameter."""
        used = {each: isinstance(each.grad, ShardedGradient) and each.grad.is_used for each in self._unit_of}
        groups = [(group, self.parameters)]
        groups += [(stages, self.units[name].parameters) for name, (stages, _) in self._across.items()]
        for ranks, parameters in groups:
            flags = torch.tensor([used[each] for each in parameters], dtype=torch.uint8, device="cpu")
            collectives.all_reduce(flags, dist.ReduceOp.MAX, group=ranks, doing="which weights were used").wait()
            used.update(zip(parameters, map(bool, flags.tolist()), strict=True))
        return list(used.values())

    def _finish_sums(self) -> None:
        self._uses.finish_sums()
        if self._replicas is not None and not self.deals_out:
            for unit in self.units.values():
                for shard in unit.gradient_shards:
                    shard.div_(self._replicas.size)

    # The optimizer's step, and code of the user

    def answer(self, ask: Callable[[], bool]) -> None:
        """Let ``ask`` provide the values for a while where the use of a parameter would be refused."""
        self._guard.asked = ask

    @contextmanager
    def in_sight(self, make_whole: Callable[[], None] | None = None, *, sizes: bool = False) -> Iterator[None]:
        """Context of user code: from its first use of one on, all parameters and gradients are whole.

        Changes of them, the same on all ranks, stay. Collective over the ranks that use them.

        Args:
            make_whole: Called at the first use, to call :meth:`show_whole`.
            sizes: Whether asking for the size of a parameter is a use as well.
        """
        if not self._is_alone:
            self._guard.make_whole, self._guard.sizes = make_whole or self.show_whole, sizes
        try:
            yield
        finally:
            self._guard.make_whole = None
            self.hide_whole()

    def show_whole(self) -> None:
        """Make every parameter and gradient whole, inside of :meth:`in_sight`. Collective."""
        self._guard.make_whole = None
        if self.group is not None:
            collectives.barrier("whole weights in a hook", self.group)
        self.let_go()
        self._is_whole = True
        for unit in self.units.values():
            unit.show_whole()

    def hide_whole(self) -> None:
        """Let the parameters rest again, if they are whole; changes of them and of their gradients stay."""
        if self._is_whole:
            for unit in self.units.values():
                unit.hide_whole()
        self._is_whole = False

    def show_pieces(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make ``parameters``, with all of their units, and gradients this rank's pieces, until :meth:`hide_pieces`."""
        self.let_go()
        self._in_pieces = list(dict.fromkeys(self._unit_of[each] for each in parameters if self.has(each)))
        for unit in self._in_pieces:
            unit.show_pieces()

    def hide_pieces(self) -> None:
        """Let the parameters that are pieces rest again; changes of them stay."""
        for unit in self._in_pieces:
            unit.hide_pieces()
        self._in_pieces = []

    # Values

    def place_of(self, parameter: nn.Parameter) -> tuple[FlatBuffer, int]:
        """Buffer that has this rank's elements of ``parameter``, and the number of the parameter there."""
        return self._places[parameter]

    def restore(self, *, keep: bool, is_last: bool) -> None:
        """Give the parameters their whole values back, without gradients. Collective.

        Args:
            keep: Whether this rank gets them as well.
            is_last: Whether to free the shards, since all ranks keep their values.
        """
        for unit in self.units.values():
            unit.restore(keep=keep)
            if is_last:
                unit.release()

    def close(self) -> None:
        """End the background threads."""
        self._shards.close()
        if self._replicas is not None:
            self._replicas.close()
