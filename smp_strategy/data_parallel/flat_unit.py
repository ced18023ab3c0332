"""Flat unit: the parameters of a unit as flat buffers that are sharded over a shard group (as in FSDP).

A unit's life in a step::

    gather  ->  wait  ->  forward  ->  free            and once more around its backward, then
    collect ->  reduce                                 for every microbatch, or for some of them

    begin_gradients ... end_gradients                  around each pass over the model
    show_pieces ... hide_pieces                        around the optimizer's step
    show_whole ... hide_whole                          around user code that looks at weights

Nothing here decides when: hooks, prefetch and the pipeline are the caller's, who does the same on all ranks of the
group. A unit that is used twice in a forward can be gathered and freed twice; its gradients are collected whenever they
are there, and reduced once, after both uses. A parameter without a gradient on some rank contributes zeros to the
reduce-scatter, so unused parameters block nobody. Its gradient is marked as unused there: ranks can compare the marks
and drop gradients that no rank has used, as in a single process.

To the optimizer every parameter is, for a moment, this rank's piece of it: the same object in the same groups,
one-dimensional, possibly empty, with a gradient alike. So any elementwise optimizer works unchanged, fused and foreach
kernels included, and keeps its state for the piece alone. See [Note: resting parameters] in
:mod:`smp_strategy.data_parallel.parameter_pieces` for the states of a parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.config.precision_options import GradientDtype
from smp_strategy.data_parallel.flat_buffer import FlatBuffer
from smp_strategy.data_parallel.flat_gradients import FlatGradients
from smp_strategy.data_parallel.flat_layout import FlatParameter, UnitLayout
from smp_strategy.data_parallel.parameter_pieces import RestingGuard
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import Handle
from smp_strategy.model.guarded_tensors import in_plain_sight, untracked
from smp_strategy.precision.dtypes import summed_dtype

__all__ = ["FlatUnit", "ShardPolicy"]


@final
@dataclass(frozen=True, kw_only=True)
class ShardPolicy:
    """Options: sharding and gathers of parameters, reduction of their gradients."""

    persistence_threshold: int = 0
    """Parameters with fewer elements stay gathered from their first use to the optimizer's step."""
    dtypes: Mapping[nn.Parameter, torch.dtype] = field(default_factory=dict)
    """Dtype in which a parameter is gathered, if units use another one than it is stored in."""
    gradient_dtype: GradientDtype = "float32"
    """Dtype in which gradients of half-precision parameters are added up."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent; ``None``: that in which they are summed on each rank."""

    def sums_in(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of parameters with ``dtype`` are added up."""
        return summed_dtype(dtype, self.gradient_dtype)


@final
class FlatUnit:
    """Sharded parameters of a unit. From its construction on the parameters rest: they are without values.

    Args:
        parameters: Parameters of the unit with their names, in the same order on all ranks; tied ones can come under
            several names.
        collectives: Collectives of the shard group.
        device: Device of the parameters.
        keeping: Policy of sharding.
        owners: Collectives of the ranks that hold the same shards, if each of them is to update a part of the shard.
        guard: Guard of resting parameters; ``None``: one that refuses all uses.

    Attributes:
        layout: Elements of each parameter that each rank holds.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        collectives: Collectives,
        device: torch.device,
        *,
        keeping: ShardPolicy | None = None,
        owners: Collectives | None = None,
        guard: RestingGuard | None = None,
    ) -> None:
        keeping = keeping or ShardPolicy()
        members = _without_doubles(parameters)
        self._named = {names[0]: parameter for names, parameter in members}
        entries = {
            _entry(names, each, keeping.dtypes.get(each, each.dtype), keeping.sums_in(each.dtype)): each
            for names, each in members
        }
        self.layout = UnitLayout.of(
            entries, collectives.size, keeping.persistence_threshold, 1 if owners is None else owners.size
        )
        dtype = keeping.reduce_dtype
        with untracked():
            self._buffers = [
                FlatBuffer(
                    flat, [entries[slot.entry] for slot in flat.slots], collectives, device, owners, dtype, guard
                )
                for flat in self.layout.flats
            ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters, each once, in the order of the layout."""
        return [parameter for buffer in self._buffers for parameter in buffer.parameters]

    @property
    def are_trained(self) -> dict[str, bool]:
        """Whether each parameter is trained now, by name, in the order in which they were given."""
        with in_plain_sight():
            return {name: parameter.requires_grad for name, parameter in self._named.items()}

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters that this rank holds now."""
        return sum(buffer.held_bytes for buffer in self._buffers)

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's gradient shards, to be summed over the replicas in place."""
        self.wait_reduced()
        return [each.own for each in self._gradients if each.own is not None]

    @property
    def is_trained(self) -> bool:
        """Whether any parameter is trained, or was in an earlier pass."""
        return bool(self._trained)

    @property
    def memory(self) -> list[range]:
        """Address ranges of the parameters while they are gathered."""
        return [buffer.memory for buffer in self._buffers]

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        with in_plain_sight():
            return any(each.are_unreduced for each in self._gradients)

    def gather(self, *, again: bool = False) -> None:
        """Begin to gather the values; does nothing while they are gathered. Collective.

        Args:
            again: Gather again what is gathered here (small parameters excepted), because other ranks may need it.
        """
        self._each(lambda buffer: buffer.gather(again=again))

    def wait(self) -> None:
        """Wait for values that are being gathered, and put them into the parameters."""
        self._each(FlatBuffer.wait)

    def free(self) -> None:
        """Free the gathered values, except those of small parameters."""
        self._each(FlatBuffer.free)

    def collect(self) -> None:
        """Move the gradients that the parameters have by now into the flat buffers.

        Raises:
            UnsupportedError: a parameter was frozen when the pass began, or its gradient is sparse.
        """
        self._each(lambda buffer: buffer.gradients.collect())

    def reduce(self, factor: float = 1.0) -> None:
        """Collect, and begin to reduce-scatter the gradients; they are added to earlier ones. Collective."""
        self._each(lambda buffer: buffer.gradients.reduce(factor))

    def wait_reduced(self) -> None:
        """Wait for gradients that are being reduced."""
        self._each(lambda buffer: buffer.gradients.wait())

    def begin_gradients(self) -> None:
        """Begin a pass: accumulate onto the gradients that the parameters have, as pieces."""
        self._each(lambda buffer: buffer.gradients.begin())

    def end_gradients(self) -> None:
        """End a pass: give the parameters its gradients, as pieces."""
        self._each(lambda buffer: buffer.gradients.end())

    def show_pieces(self) -> None:
        """Make every parameter and its gradient this rank's piece, until :meth:`hide_pieces`."""
        self._each(FlatBuffer.show_pieces)

    def hide_pieces(self) -> None:
        """Let the parameters rest; changes of their values and gradients stay."""
        self._each(FlatBuffer.hide_pieces)

    def show_whole(self) -> None:
        """Make every parameter and its gradient whole, until :meth:`hide_whole`. Collective."""
        self._each(FlatBuffer.show_whole)

    def hide_whole(self) -> None:
        """Let the parameters rest; changes of their values and gradients, the same on all ranks, stay."""
        self._each(FlatBuffer.hide_whole)

    def places(self) -> Iterator[tuple[nn.Parameter, tuple[FlatBuffer, int]]]:
        """Each parameter, with its buffer and its number there."""
        for buffer in self._buffers:
            for number, parameter in enumerate(buffer.parameters):
                yield parameter, (buffer, number)

    def restore(self, *, keep: bool = True) -> None:
        """Give the parameters their whole values back, in memory of their own, without gradients. Collective."""
        self._each(lambda buffer: buffer.restore(keep=keep))

    def release(self) -> None:
        """Free the shards, after all ranks have restored the parameters for good."""
        for buffer in self._buffers:
            buffer.release()

    def take_gradients(self) -> tuple[list[Tensor], list[Handle[object]]]:
        """Move the reduced gradients of the shard group out of the unit.

        Returns:
            The gradient shard of each kind of trained parameters (zeros if there is no gradient), and the work that
            must be over before it is complete.
        """
        with untracked():
            found = [gradients.take_reduced() for gradients in self._trained]
        return [shard for shard, _ in found], [reducing for _, reducing in found if reducing is not None]

    def put_gradients(self, shards: Iterable[Tensor]) -> None:
        """Set the gradients to their sums over the replicas: of the shards, or of this rank's own part of them."""
        with untracked():
            for gradients, shard in zip(self._trained, shards, strict=True):
                gradients.put_summed(shard)

    def _each(self, act: Callable[[FlatBuffer], object]) -> None:
        with untracked():
            for buffer in self._buffers:
                act(buffer)

    @property
    def _gradients(self) -> list[FlatGradients]:
        return [buffer.gradients for buffer in self._buffers]

    @property
    def _trained(self) -> list[FlatGradients]:
        return [gradients for gradients in self._gradients if gradients.is_trained]


def _without_doubles(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    found: dict[int, tuple[tuple[str, ...], nn.Parameter]] = {}
    for name, parameter in parameters:
        names, _ = found.get(id(parameter), ((), parameter))
        found[id(parameter)] = (*names, name), parameter
    return list(found.values())


def _entry(
    names: tuple[str, ...], parameter: nn.Parameter, use_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> FlatParameter:
    return FlatParameter(
        names=names,
        shape=tuple(parameter.shape),
        # Dense strides in the parameter's own order of dimensions: `channels_last` stays, gaps do not.
        stride=torch.empty_like(parameter, device="meta").stride(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.itemsize,
        requires_grad=parameter.requires_grad,
        use_dtype=str(use_dtype).removeprefix("torch."),
        use_itemsize=use_dtype.itemsize,
        gradient_dtype=str(gradient_dtype).removeprefix("torch."),
        gradient_itemsize=gradient_dtype.itemsize,
    )
