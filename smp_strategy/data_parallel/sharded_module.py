"""The units of a stage with their parameters spread over a shard group, as the engine meets them.

Each parameter is in one :class:`~smp_strategy.data_parallel.flat_unit.FlatUnit`: those that a unit has for itself make
up one, those that the same several units share another, which is gathered for each of them. Between passes over the
model all of them rest, and ``.grad`` is this rank's piece in disguise.

When gradients are summed. Backward adds up those of the shard group, as soon as they are there, and divides by its
size. What other shard groups have computed (the replicas of the group), and other stages where they hold the same
parameter, is added once per step of the optimizer (MiCS; Zhang et al. 2022, section 3.4). So gradients that are summed
already, and to which more is added, stay right if they are averaged over the replicas again.

Replicas of a shard group all update their shards alike, or they **deal them out**: of its shard each updates a part,
and passes it on. Instead of an all-reduce of the gradients there is a reduction to the owners with half of the bytes,
and the new values are the other half. These travel while the next forward computes with the units before, so that a
slow link has something to do all the time; and optimizer state takes less memory. Pieces, their gradients and their
state are then spread over the shard group and its replicas, all together; what differs is how a unit is gathered and
reduced, which is done in the shard group. Gradients are summed in every pass of several that accumulate.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_layout import Piece
from smp_strategy.data_parallel.flat_unit import FlatUnit, ShardPolicy
from smp_strategy.data_parallel.gather_schedule import GatherPolicy, GatherSchedule
from smp_strategy.data_parallel.resting import OnUse
from smp_strategy.data_parallel.sharded_gradient import ShardedGradient
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.errors import UnsupportedError

__all__ = ["ShardedModule"]


@final
class ShardedModule:
    """See the module docstring. From its construction on the parameters rest.

    Args:
        parameters: those to be spread with their names, by the units that have them; the same on all ranks of a stage.
        shards: collectives of the shard group.
        replicas: collectives of the ranks with the same pieces, if there are several.
        device: where the parameters are.
        across: of the keys of ``parameters``, those with units of other stages, too: the group of the ranks that have
            the same pieces on all of these stages, and whether this stage is the first of them.
        keeping: how parameters are kept.
        timing: when units are gathered and reduced.
        deals_out: let each of the replicas update a part of its shards and pass it on.

    Attributes:
        units: by name.
        group: ranks that compare whether they are in the same hook, before it sees whole weights; ``None``: none do.
        deals_out: as given. Pieces are those of the shard group and its replicas, and not of the shard group alone.
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
        self.units = {
            "+".join(users): FlatUnit(members, shards, device, keeping=keeping, owners=owners)
            for users, members in parameters.items()
        }
        self._parts: dict[str, list[str]] = {}
        for users in parameters:
            for user in users:
                self._parts.setdefault(user, []).append("+".join(users))
        self._unit_of = {each: unit for unit in self.units.values() for each in unit.parameters}
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
        self._on_use = OnUse()
        for parameter in self._unit_of:
            self._on_use.watch(parameter)
        self._is_open = False
        self._has_failed = False
        # Since ranks have told each other for the last time.
        self._stops: list[str] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are spread."""
        return list(self._unit_of)

    @property
    def held_bytes(self) -> int:
        """Bytes of values that this rank holds now."""
        return sum(unit.held_bytes for unit in self.units.values())

    @property
    def most_gathered_bytes(self) -> int:
        """Bytes of values that were gathered for passes and let go again, at most at a time."""
        return self._uses.most_bytes

    @property
    def is_whole(self) -> bool:
        """Whether every parameter and gradient is whole just now, for code of the user."""
        return self._is_whole

    def has(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is spread."""
        return parameter in self._unit_of

    # Passes over the model

    def call(self, name: str, function: Callable[..., Any], token: object) -> Callable[..., Any]:
        """Make ``function``, which calls the unit ``name``, find its parameters there.

        Args:
            name: of the unit.
            function: what to call.
            token: equal for calls that one thread makes one after the other: those of a microbatch.
        """
        if self._on_use.make_whole is not None:
            self._on_use.make_whole()
        for part in () if self._is_whole else self._parts.get(name, ()):
            function = partial(self._call, part, function, token)
        return function

    def _call(self, part: str, function: Callable[..., Any], token: object, *args: Any, **kwargs: Any) -> Any:
        return self._uses.call(part, function, args, kwargs, token)

    @contextmanager
    def training(self, *, sums: bool) -> Iterator[None]:
        """A pass with backward: gradients are added to those that the parameters have. Collective.

        Args:
            sums: add them up over the replicas as well, beginning with :meth:`around_last`.
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
        """A pass without backward. Collective."""
        with self._unless_it_fails():
            self._uses.begin_pass()
            yield
            self.end_pass()

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Where an exception ends a pass on all ranks, and they go on, it is brought to its end before the next one."""
        self._end_failed()
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    def _end_failed(self) -> None:
        """If a pass has failed, let what it has begun come to its end, and drop its gradients. Collective."""
        if self._has_failed:
            self._has_failed = False
            self._stops.clear()
            self._uses.end_pass()
            self._uses.finish_sums()

    @contextmanager
    def around_last(self) -> Iterator[None]:
        """In here, the last backward of a pass that sums over the replicas runs."""
        self._uses.is_last = True
        yield

    def begin_pass(self) -> None:
        """Code begins, or goes on, that will stop (:meth:`stop_at`) and still have graphs: units are gathered for it.

        The pass ends when a backward that :meth:`training` is around has ended, by :meth:`let_go`, or by
        :meth:`end_pass`. What has saved weights by then finds them again, gathered anew, or learns that they have
        changed.
        """
        self._end_failed()
        self._is_open = True
        self._uses.may_return_weights = False

    def end_pass(self) -> None:
        """A pass has ended: nothing stays gathered. Collective."""
        self._uses.end_pass()
        if self._is_open:
            self._is_open = False
            self._agree_on_stops()

    def stop_at(self, place: str) -> None:
        """That code stops at ``place``; that of all ranks does so, or they are told."""
        self._stops.append(place)

    def let_go(self) -> None:
        """End the pass that :meth:`begin_pass` has begun, if it goes on, and one that has failed. Collective.

        To be called before values are shown, as those that are gathered get out of date, and before any other
        collective, as ranks that still gather do not come to it.
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
        """More will be added to the gradients, by each shard group and on each stage."""
        for name, (_, is_first) in self._across.items():
            if self._is_final and not is_first:
                # What is there is a sum over the stages already, and equal on all of them: one goes on with it.
                for parameter in self.units[name].parameters:
                    parameter.grad = None
        # Where parts were not added up yet, all is averaged once more.
        self._has_sums = self._has_sums and self._is_final
        self._is_final = False

    def sum_gradients(self, group: dist.ProcessGroup) -> None:
        """Average the gradients over the replicas, if anything was added. Collective.

        Args:
            group: all ranks of this stage, the shard group and its replicas: they tell each other what they have used,
                and let go of gradients of what none of them has, as one process would have none.
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
        """For each parameter, whether any rank of its stages has used it."""
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

    @contextmanager
    def in_sight(self, make_whole: Callable[[], None] | None = None, *, sizes: bool = False) -> Iterator[None]:
        """Code of the user runs in here. From its first use on every parameter and gradient is whole.

        What is done to them, on all ranks alike, stays. Collective over those that use them.

        Args:
            make_whole: called at the first use, to call :meth:`show_whole`.
            sizes: to ask for the size of a parameter is a use as well.
        """
        self._on_use.make_whole, self._on_use.sizes = make_whole or self.show_whole, sizes
        try:
            yield
        finally:
            self._on_use.make_whole = None
            self.hide_whole()

    def show_whole(self) -> None:
        """Inside of :meth:`in_sight`: let every parameter and gradient be whole. Collective."""
        self._on_use.make_whole = None
        if self.group is not None:
            collectives.barrier("whole weights in a hook", self.group)
        self.let_go()
        self._is_whole = True
        for unit in self.units.values():
            unit.show_whole()

    def hide_whole(self) -> None:
        """Let the parameters rest again, if they are whole, with what was done to them and to their gradients."""
        if self._is_whole:
            for unit in self.units.values():
                unit.hide_whole()
        self._is_whole = False

    def show_pieces(self, parameters: Iterable[nn.Parameter]) -> None:
        """Until :meth:`hide_pieces`, each of ``parameters`` and its gradient, and all of its unit, is a piece of it."""
        self.let_go()
        self._in_pieces = list(dict.fromkeys(self._unit_of[each] for each in parameters if self.has(each)))
        for unit in self._in_pieces:
            unit.show_pieces()

    def hide_pieces(self) -> None:
        """Let the parameters that are pieces rest again, with what has become of those."""
        for unit in self._in_pieces:
            unit.hide_pieces()
        self._in_pieces = []

    # Values

    def piece_of(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """This rank's piece of a ``tensor`` with the shape of ``parameter``."""
        return self._unit_of[parameter].piece_of(parameter, tensor)

    def own_piece(self, parameter: nn.Parameter) -> Piece:
        """Which elements of ``parameter`` this rank updates: a run of them."""
        return self._unit_of[parameter].own_piece(parameter)

    def own_values(self, parameter: nn.Parameter) -> Tensor:
        """The values of these, as long as the module is spread."""
        return self._unit_of[parameter].own_values(parameter)

    def stride_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """How the elements of ``parameter`` stand in memory, from which runs are taken."""
        return self._unit_of[parameter].stride_of(parameter)

    def runs_to_fill(self, parameter: nn.Parameter) -> list[tuple[int, Tensor]]:
        """All memory of this rank for values of ``parameter``, to be filled between passes, on all ranks alike."""
        return self._unit_of[parameter].runs_to_fill(parameter)

    def take_gradient(self, parameter: nn.Parameter, piece: Tensor) -> None:
        """Let ``parameter`` go on with this rank's ``piece`` of a gradient that is summed already."""
        self._unit_of[parameter].take_gradient(parameter, piece)

    def fill(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Give parameters new values, which are whole, on all ranks alike."""
        for unit in self.units.values():
            unit.fill(values)

    def restore(self, *, keep: bool, is_last: bool) -> None:
        """Give the parameters all of their values back, and no gradients. Collective.

        Args:
            keep: whether on this rank as well.
            is_last: let go of the shards: all ranks keep what they get.
        """
        for unit in self.units.values():
            unit.restore(keep=keep)
            if is_last:
                unit.release()

    def close(self) -> None:
        """Let go of what is needed in the background."""
        self._shards.close()
        if self._replicas is not None:
            self._replicas.close()
