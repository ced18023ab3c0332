"""A unit whose parameters are spread over the ranks of a shard group.

What happens to a unit in a step::

    gather  ->  wait  ->  forward  ->  free            and once more around its backward, then
    collect ->  reduce                                 for every microbatch, or for some of them

    begin_gradients ... end_gradients                  around each pass over the model
    show_pieces ... hide_pieces                        around the optimizer's step
    show_whole ... hide_whole                          around code of the user that looks at weights

Nothing here knows when: hooks, prefetch and the pipeline are the caller's, who does the same on all ranks of the group.
A unit that is used twice in a forward can be gathered and freed twice; its gradients are collected whenever they are
there, and reduced once, when both uses are through. What a rank has no gradient of counts as zero there, so nobody
waits for an unused parameter. Its gradient knows that it was not used here: ranks can tell each other, and drop those
that nobody has used, as in one process.

For the optimizer every parameter is, for a moment, this rank's piece of it: the same object in the same groups, one-
dimensional, possibly empty, with a gradient alike. So any elementwise optimizer works unchanged, fused and foreach
kernels included, and keeps its state for the piece alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_buffer import FlatBuffer
from smp_strategy.data_parallel.flat_layout import FlatParameter, Piece, UnitLayout
from smp_strategy.data_parallel.flat_layout_views import Run
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.work import Work
from smp_strategy.model.guarded_tensors import in_plain_sight

__all__ = ["FlatUnit", "ShardPolicy"]


@final
@dataclass(frozen=True, kw_only=True)
class ShardPolicy:
    """How parameters are kept, gathered, and what becomes of their gradients."""

    persistence_threshold: int = 0
    """Those with fewer elements stay gathered from their first use to the optimizer's step."""
    dtypes: Mapping[nn.Parameter, torch.dtype] = field(default_factory=dict)
    """In what those are gathered that units see in another dtype than they are kept in."""
    reduce_dtype: torch.dtype | None = None
    """In what gradients travel to be added up; ``None``: in what they are added up on each rank."""


@final
class FlatUnit:
    """See the module docstring. From its construction on the parameters rest: they are without values.

    Args:
        parameters: those of the unit with their names; tied ones can come under several. In the same order on all
            ranks.
        collectives: those of the shard group.
        device: where the parameters are.
        keeping: how they are kept.
        owners: collectives of the ranks that have the same shards, if each of them is to update a part of them.

    Attributes:
        layout: which elements of which parameter each rank has.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        collectives: Collectives,
        device: torch.device,
        *,
        keeping: ShardPolicy | None = None,
        owners: Collectives | None = None,
    ) -> None:
        keeping = keeping or ShardPolicy()
        members = _without_doubles(parameters)
        self._named = {names[0]: parameter for names, parameter in members}
        entries = {_entry(names, each, keeping.dtypes.get(each, each.dtype)): each for names, each in members}
        self.layout = UnitLayout.of(
            entries, collectives.size, keeping.persistence_threshold, 1 if owners is None else owners.size
        )
        dtype = keeping.reduce_dtype
        with _untracked():
            self._buffers = [
                FlatBuffer(flat, [entries[slot.entry] for slot in flat.slots], collectives, device, owners, dtype)
                for flat in self.layout.flats
            ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Each once, in the order of the layout."""
        return [parameter for buffer in self._buffers for parameter in buffer.parameters]

    @property
    def are_trained(self) -> dict[str, bool]:
        """Of each parameter, by name and in the order in which they were given, whether it is trained now."""
        with in_plain_sight():
            return {name: parameter.requires_grad for name, parameter in self._named.items()}

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters that this rank holds now."""
        return sum(buffer.held_bytes for buffer in self._buffers)

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's share of the gradients: what is to be added up over replicas, in place."""
        self.wait_reduced()
        return [buffer.gradients for buffer in self._buffers if buffer.gradients is not None]

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is trained, or was in an earlier pass."""
        return bool(self._trained)

    @property
    def memory(self) -> list[range]:
        """The addresses of the parameters, while they are gathered."""
        return [buffer.memory for buffer in self._buffers]

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        with in_plain_sight():
            return any(buffer.has_gradients for buffer in self._buffers)

    def gather(self, *, anew: bool = False) -> None:
        """Begin to gather the values; does nothing while they are gathered. Collective.

        Args:
            anew: gather all the same what comes and goes, because other ranks may need it.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.gather(anew=anew)

    def wait(self) -> None:
        """Until the values that are being gathered are there, in the parameters."""
        with _untracked():
            for buffer in self._buffers:
                buffer.wait()

    def free(self) -> None:
        """Keep this rank's shards only, and what is small."""
        with _untracked():
            for buffer in self._buffers:
                buffer.free()

    def collect(self) -> None:
        """Take the gradients that the parameters have by now, and leave them without.

        Raises:
            UnsupportedError: a parameter was frozen when the pass began, or its gradient is sparse.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.collect()

    def reduce(self, factor: float = 1.0) -> None:
        """Collect, and begin to add up the gradients over the group, to those of before. Collective.

        Args:
            factor: what this rank's gradients are multiplied by.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.reduce(factor)

    def wait_reduced(self) -> None:
        """Until the gradients that are being reduced are there."""
        with _untracked():
            for buffer in self._buffers:
                buffer.wait_reduced()

    def begin_gradients(self) -> None:
        """A pass begins: go on with the gradients that the parameters have, as pieces."""
        with _untracked():
            for buffer in self._buffers:
                buffer.begin_gradients()

    def end_gradients(self) -> None:
        """The pass has ended: let the parameters have its gradients, as pieces."""
        with _untracked():
            for buffer in self._buffers:
                buffer.end_gradients()

    def show_pieces(self) -> None:
        """Until :meth:`hide_pieces`, let every parameter, and its gradient, be this rank's piece of it."""
        with _untracked():
            for buffer in self._buffers:
                buffer.show_pieces()

    def hide_pieces(self) -> None:
        """Let the parameters rest; what happened to their values and gradients stays."""
        with _untracked():
            for buffer in self._buffers:
                buffer.hide_pieces()

    def show_whole(self) -> None:
        """Until :meth:`hide_whole`, let every parameter, and its gradient, be whole. Collective."""
        with _untracked():
            for buffer in self._buffers:
                buffer.show_whole()

    def hide_whole(self) -> None:
        """Let the parameters rest; what happened to their values and gradients, on all ranks alike, stays."""
        with _untracked():
            for buffer in self._buffers:
                buffer.hide_whole()

    def fill(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Give parameters new values, which are whole, on all ranks alike."""
        with _untracked():
            for buffer in self._buffers:
                for number, parameter in enumerate(buffer.parameters):
                    if parameter in values:
                        buffer.fill(number, values[parameter])

    def piece_of(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """This rank's piece of a ``tensor`` with the shape of ``parameter``: one-dimensional, in memory of its own."""
        buffer, number = self._place(parameter)
        with _untracked():
            return buffer.piece_of(number, tensor)

    def own_piece(self, parameter: nn.Parameter) -> Piece:
        """Which elements of ``parameter`` this rank updates."""
        buffer, number = self._place(parameter)
        return buffer.own_pieces[number]

    def run_of(self, parameter: nn.Parameter) -> Run:
        """The values that this rank updates of ``parameter``."""
        buffer, number = self._place(parameter)
        return buffer.run_of(number)

    def stride_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """How the elements of ``parameter`` stand in memory, from which runs are taken."""
        buffer, number = self._place(parameter)
        return buffer.layout.slots[number].entry.stride

    def runs_to_fill(self, parameter: nn.Parameter) -> list[Run]:
        """All memory of this rank for values of ``parameter``, to be filled while it rests, on all ranks alike."""
        buffer, number = self._place(parameter)
        with _untracked():
            return buffer.runs_to_fill(number)

    def take_gradient(self, parameter: nn.Parameter, piece: Tensor) -> None:
        """Let ``parameter``, which rests, go on with this ``piece`` of a gradient."""
        buffer, number = self._place(parameter)
        with _untracked():
            buffer.take_gradient(number, piece)

    def _place(self, parameter: nn.Parameter) -> tuple[FlatBuffer, int]:
        return next(
            (buffer, number)
            for buffer in self._buffers
            for number, own in enumerate(buffer.parameters)
            if own is parameter
        )

    def restore(self, *, keep: bool = True) -> None:
        """Give the parameters all of their values back, in memory of their own, without gradients. Collective.

        Args:
            keep: whether on this rank as well.
        """
        with _untracked():
            for buffer in self._buffers:
                buffer.restore(keep=keep)

    def release(self) -> None:
        """The parameters have been given back on all ranks, for good: let go of the shards."""
        for buffer in self._buffers:
            buffer.release()

    def take_gradients(self) -> tuple[list[Tensor], list[Work[object]]]:
        """Hand over what the shard group has added up of the gradients; the unit has nothing of it afterwards.

        Returns:
            The shard of each kind of parameters that are trained, zeros where there are none, and what must be over
            before it is complete.
        """
        with _untracked():
            found = [buffer.take_gradients() for buffer in self._trained]
        return [shard for shard, _ in found], [reducing for _, reducing in found if reducing is not None]

    def put_gradients(self, shards: Iterable[Tensor]) -> None:
        """Take the sums of that over the replicas, of this rank's own parts where each has some."""
        with _untracked():
            for buffer, shard in zip(self._trained, shards, strict=True):
                buffer.put_gradients(shard)

    @property
    def _trained(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._buffers if buffer.is_trained]


@contextmanager
def _untracked() -> Iterator[None]:
    """Buffers are ordinary tensors, also where they are first used in inference mode; parameters can be touched."""
    with torch.inference_mode(False), torch.no_grad(), in_plain_sight():
        yield


def _without_doubles(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    found: dict[int, tuple[tuple[str, ...], nn.Parameter]] = {}
    for name, parameter in parameters:
        names, _ = found.get(id(parameter), ((), parameter))
        found[id(parameter)] = (*names, name), parameter
    return list(found.values())


def _entry(names: tuple[str, ...], parameter: nn.Parameter, use_dtype: torch.dtype) -> FlatParameter:
    return FlatParameter(
        names=names,
        shape=tuple(parameter.shape),
        # As they are in memory, less the gaps.
        stride=torch.empty_like(parameter, device="meta").stride(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.itemsize,
        requires_grad=parameter.requires_grad,
        use_dtype=str(use_dtype).removeprefix("torch."),
        use_itemsize=use_dtype.itemsize,
    )
