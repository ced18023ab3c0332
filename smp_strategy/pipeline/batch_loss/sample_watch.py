"""Watches the glue of a dry run for a loss that compares samples of its batch.

Such a loss (contrastive losses with negatives in the batch, correlations over the batch, prototypes) is another one in
a microbatch, which has fewer samples to compare, and none at all if it has one. A loss that counts each sample for
itself is a sum ``f(a) + g(b)``, where ``a`` are the values of some samples and ``b`` those of the others. So with
other values ``a'`` and ``b'``::

    f(a, b) - f(a', b) - f(a, b') + f(a', b') = 0

Beside the dry run, each operation of the glue runs in these four *worlds*, with made-up results of units, and with
tensors of the batch that differ in some samples. Where the loss has another difference than zero, it compares samples;
the first operation with one on the way to it does so. No operation needs a rule. Units are taken to keep samples apart
(norms of a batch have a note of their own): a row of a result belongs to the sample of that row of their arguments.

There are two such groups of worlds. One has made-up values that may be probabilities, the other those that reach beyond
margins; and each parts the samples in its own way, since samples that are compared may be on one side.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import get_testing_overrides

from smp_strategy.model.rng import seeded
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import flatten_call, leaves_of, unflatten_call
from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord, BatchValue, OutOfSightError
from smp_strategy.pipeline.batch_loss.loss_terms import Divisor, term_of
from smp_strategy.pipeline.batch_loss.sample_rows import Rows, rows_of_changes
from smp_strategy.pipeline.placed_ops import calling_line, is_in_place, operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["SampleWatch"]

_FIRST, _A, _B, _BOTH = range(4)
_GROUP, _WORLDS = 4, 8
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"})
# Width of the made-up values of the second group.
_REACH = 8.0
# Of larger tensors only the places of samples are followed: eight worlds in double precision take 64 MiB of this one.
_MOST_ELEMENTS = 2**20
# Of the largest value: far above the rounding of double precision, and of what code computes in single precision.
_TOLERANCE = 1e-6
# What the repetition of a call with made-up values may end with.
_FAILED = (
    OutOfSightError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _Followed(NamedTuple):
    """A placed tensor in all worlds."""

    is_alive: Callable[[], Any]
    worlds: list[Tensor]
    """One for each world: those of one group, then those of the other. A single one if it is the same in all, and none
    of a large tensor."""
    rows: list[Rows | None]
    """Where the samples are, in both groups, if it is made up; else empty."""
    is_coupled: bool
    """Whether it has another difference than zero."""


class _Found(NamedTuple):
    """An operation that computes with several samples at once."""

    value: int
    """Number of its result."""
    text: str


@final
class SampleWatch:
    """Runs the operations of a microbatch's program in four worlds.

    Attributes:
        record: records the program in its context.
        comparison: operation on the way to the loss that computes with several samples at once, as text; empty: there
            is none.
    """

    LEAST_SAMPLES: ClassVar = 4
    """Number of samples that a microbatch needs; of fewer, some may happen not to be compared."""

    def __init__(self, record: BatchRecord) -> None:
        self.comparison = ""
        self.record = record
        self._followed: dict[int, _Followed] = {}
        self._coupled = set[int]()
        self._found: list[_Found] = []
        number = record.num_samples
        places = torch.arange(number)
        # An odd number of the first ones, so that neighbours, opposite samples and halves are apart; every second one.
        self._sides = (places < max((number // 2 - 1) // 2 * 2 + 1, 1), places % 2 == 0)
        self._variants, self._labels = list[int](), list[tuple[int, int]]()
        for side in self._sides:
            rows = (side, ~side, torch.ones_like(side))
            self._variants += [0, *(record.add_variant(each) for each in rows)]
            self._labels.append(tuple(record.add_variant(each, changes_labels=True) for each in rows[:2]))  # type: ignore[arg-type]

    def call(
        self, interpret: Callable[..., Any], position: int, kind: str, name: str, callee: Callee, args: Any, kwargs: Any
    ) -> Any:
        """Let ``interpret`` make a call of the program, and make it in the worlds; see ``ProgramTerms.call``."""
        with self.record.set_aside():
            leaves, structure = flatten_call(args, kwargs)
            is_known = kind == "op" and callee.function in _known_operations() and _are_small(leaves)
            # Before the call, which may change its arguments in place.
            given = self._given(callee, args, kwargs, leaves) if is_known else []
            rows = [] if is_known else self._rows(leaves)
            result = interpret(kind, name, callee, args, kwargs)
            made = leaves_of(result)
            if is_known and leaves and is_in_place(operation_name(callee.function)):
                made = [leaves[0]]
            if any(isinstance(each, PlacedTensor) for each in made):
                worlds = self._run(callee, given, structure, position, made) if is_known and _are_small(made) else None
                found = [] if worlds is None else [(each, list[Rows | None]()) for each in worlds]
                found = found or [self._made_up(each, rows or self._rows(leaves), position) for each in made]
                self._note(operation_name(callee.function) if kind == "op" else name, leaves, made, found)
        return result

    # Arguments

    def _given(self, callee: Callee, args: Any, kwargs: Any, leaves: Sequence[Any]) -> list[list[Any]]:
        """Each leaf in the worlds."""
        given = [self._in_worlds(leaf) for leaf in leaves]
        pairs = zip(leaves, given, strict=True)
        if any(len(worlds) > 1 and not isinstance(leaf, PlacedTensor) for leaf, worlds in pairs):
            # A number of the whole batch, which has a weight of its own, is the same in all worlds.
            term = term_of(callee.function, args, kwargs, self.record, {})
            if isinstance(term, Divisor) and self.record.has_totals(term.value):
                number = next(place for place, leaf in enumerate(leaves) if leaf is args[term.place])
                given[number] = given[number][:1]
        if leaves and is_in_place(operation_name(callee.function)) and not isinstance(leaves[0], PlacedTensor):
            given[0] = [each.clone() if isinstance(each, Tensor) else each for each in given[0]]  # the user's own
        return given

    def _in_worlds(self, leaf: Any) -> list[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf]
        followed = self._find(leaf)
        if followed is not None and followed.worlds:
            return followed.worlds
        if isinstance(leaf, PlacedTensor) or leaf.is_meta or getattr(leaf, "is_guarded", False):
            return [_example(leaf)]
        found = self.record.find(leaf)
        try:
            if found is not None and found.entry >= 0 and leaf.is_floating_point():
                return [_exact(self.record.value(found, each)) for each in self._variants]
            return [_exact(leaf.detach())]
        except _FAILED:
            return [leaf]

    def _find(self, leaf: Any) -> _Followed | None:
        followed = self._followed.get(id(leaf)) if isinstance(leaf, PlacedTensor) else None
        return followed if followed is not None and followed.is_alive() is leaf else None

    def _rows(self, leaves: Sequence[Any]) -> list[tuple[Tensor, list[Rows | None]]]:
        """Where the samples are in each of the ``leaves`` of which that is known, in both groups."""
        found = []
        for leaf in leaves:
            followed = self._find(leaf)
            rows: list[Rows | None] = []
            if followed is not None and followed.rows:
                rows = followed.rows
            elif followed is not None and len(followed.worlds) > 1:
                groups = followed.worlds[:_GROUP], followed.worlds[_GROUP:]
                rows = [rows_of_changes(group[_FIRST], group[_A], group[_B]) for group in groups]
            elif isinstance(leaf, Tensor) and (known := self.record.find(leaf)) is not None:
                rows = self._rows_of_batch(leaf, known)
            if rows and rows[0] is not None:
                found.append((leaf, rows))
        return found

    def _rows_of_batch(self, leaf: Tensor, known: BatchValue) -> list[Rows | None]:
        dim = known.facts.dim
        if dim is not None and leaf.shape[dim] == self.record.num_samples:
            return [Rows(dim, side, ~side) for side in self._sides]
        try:
            values = [[self.record.value(known, each) for each in (0, *others)] for others in self._labels]
        except _FAILED:
            return []
        found = [rows_of_changes(*each) for each in values]
        # Samples that are mixed before they meet a unit are an augmentation.
        return [] if any(each is None or each.dim is None for each in found) else found

    # Calls

    def _run(
        self, callee: Callee, given: list[list[Any]], structure: Any, position: int, made: Sequence[Any]
    ) -> list[list[Tensor]] | None:
        """Results of an operation in the worlds; ``None``: it does not run with made-up values."""
        name, is_same = operation_name(callee.function), all(len(each) == 1 for each in given)
        if is_in_place(name) and not is_same and len(given[0]) == 1:
            given[0] = [given[0][0], *(given[0][0].clone() for _ in range(_WORLDS - 1))]
        results = list[list[Any]]()
        for world in range(1 if is_same else _WORLDS):
            leaves = [each[world % len(each)] for each in given]
            args, kwargs = unflatten_call(leaves, structure)
            try:
                with torch.no_grad(), seeded(position, _placed(made)[0].spec.device):
                    result = leaves_of(callee.function(*args, **kwargs))
            except _FAILED:
                if world < _GROUP:
                    return None
                result = [each * torch.nan if isinstance(each, Tensor) else each for each in results[0]]
            if is_in_place(name) or (name in _CASTS and _is_floating(result[0]) and _is_floating(leaves[0])):
                result = leaves[:1]  # also of a cast: the rounding of a sum is no difference
            if len(result) != len(made) or not all(map(_is_alike, result, made)):
                return None
            results.append(result)
        found = [[_exact(result[place]) for result in results] for place in range(len(made))]
        # Indices and masks that the model's values give stay as they are.
        return [worlds if _is_floating(worlds[0]) else worlds[:1] for worlds in found]

    def _made_up(
        self, made: Any, rows: Sequence[tuple[Tensor, list[Rows | None]]], position: int
    ) -> tuple[list[Tensor], list[Rows | None]]:
        """Result of a unit in the worlds, as of one that keeps its samples apart, and where its samples are."""
        if not isinstance(made, PlacedTensor):
            return [], []
        if not made.is_floating_point():
            return [_example(made)], []
        is_mixed = any(
            each is not None and each.dim is None and leaf.requires_grad for leaf, both in rows for each in both
        )
        known: list[Rows | None] = []
        for leaf, both in sorted(rows, key=lambda each: each[0].shape != made.shape):
            if not is_mixed and all(_has_rows(made, leaf, each.dim) for each in both if each is not None):
                known = both
                break
        if not _are_small([made]):
            return [], known
        with seeded(position, made.spec.device):
            worlds = [_example(made) for _ in range(_WORLDS)]
        worlds[_GROUP:] = [(each - 0.5) * _REACH for each in worlds[_GROUP:]]
        if is_mixed:
            return worlds, []
        found = list[Tensor]()
        for (value, changed, *_), each in zip((worlds[:_GROUP], worlds[_GROUP:]), known, strict=False):
            found += [value] * _GROUP if each is None else each.changes(value, changed)
        return found or worlds[:1], known

    def _note(
        self,
        name: str,
        leaves: Sequence[Any],
        made: Sequence[Any],
        found: Sequence[tuple[list[Tensor], list[Rows | None]]],
    ) -> None:
        before = [followed for leaf in leaves if (followed := self._find(leaf)) is not None]
        was_coupled = any(each.is_coupled for each in before)
        for each, (values, rows) in zip(made, found, strict=True):
            if not isinstance(each, PlacedTensor):
                continue
            is_coupled = len(values) > 1 and (_differ(values[:_GROUP]) or _differ(values[_GROUP:]))
            self._followed[id(each)] = _Followed(weakref.ref(each, self._forget(id(each))), values, rows, is_coupled)
            if is_coupled:
                self._coupled.add(each.value.id)
                if not was_coupled:
                    self._found.append(_Found(each.value.id, f"`{name}`{calling_line()} computes with several of them"))
            else:
                self._coupled.discard(each.value.id)

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(ended: Any) -> None:
            found = self._followed.get(key)
            if found is not None and found.is_alive is ended:
                del self._followed[key]

        return forget

    def end(self, trace: Trace, losses: Sequence[Any]) -> None:
        """After the program: find out what has led to its loss, or to other ``losses`` of a backward."""
        leading = {loss.value.id for loss in losses if isinstance(loss, PlacedTensor)}
        leading |= set[int]() if trace.loss is None else {trace.loss}
        leading &= self._coupled
        for event in reversed(trace.events):
            if any(value.id in leading for value in event.outputs):
                leading |= {value.id for value in event.inputs} & self._coupled
        self.comparison = next((found.text for found in self._found if found.value in leading), "")
        self._followed.clear()


def _is_alike(value: Any, made: Any) -> bool:
    return not isinstance(made, PlacedTensor) or (isinstance(value, Tensor) and value.shape == made.shape)


def _has_rows(made: Tensor, given: Tensor, dim: int | None) -> bool:
    """Whether the places along a dim of an argument are those of the same dim of the result."""
    return dim is not None and made.ndim > dim and made.shape[dim] == given.shape[dim]


def _placed(values: Sequence[Any]) -> list[PlacedTensor]:
    return [each for each in values if isinstance(each, PlacedTensor)]


def _are_small(values: Sequence[Any]) -> bool:
    """Whether there is room for all tensors of ``values`` in all worlds."""
    return all(each.numel() <= _MOST_ELEMENTS for each in values if isinstance(each, Tensor))


def _known_operations() -> Any:
    """Operations of PyTorch, which do nothing but compute."""
    return get_testing_overrides()


def _example(like: Any) -> Tensor:
    """Made-up values: numbers that may be probabilities, indices of something that exists, masks that select all."""
    shape, device = tuple(like.shape), like.spec.device if isinstance(like, PlacedTensor) else like.device
    device = torch.device("cpu") if device.type == "meta" else device
    if like.is_floating_point():
        return torch.rand(shape, dtype=torch.float64, device=device) * 0.8 + 0.1
    return (torch.ones if like.dtype == torch.bool else torch.zeros)(shape, dtype=like.dtype, device=device)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _exact(value: Any) -> Any:
    """``value`` in double precision, if it is a tensor of floating-point numbers."""
    return value.double() if _is_floating(value) else value


def _differ(worlds: Sequence[Tensor]) -> bool:
    size = max(float(each.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if each.numel() else 0.0 for each in worlds)
    difference = worlds[_FIRST] - worlds[_A] - worlds[_B] + worlds[_BOTH]
    return bool((difference.nan_to_num(0.0, 0.0, 0.0).abs() > _TOLERANCE * size).any())
