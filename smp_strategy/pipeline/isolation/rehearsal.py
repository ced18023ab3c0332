"""Rehearsal: a dry run of microbatches that take turns as on a given stage, to compare orders of turns.

Nothing is computed. Values that Python code reads are made up, and are equal in every rehearsal of a step. A program
pauses at each receive of the stage. The plain values that it passes to calls are noted, to be compared with those of
another order of turns.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from smp_strategy.distributed.agreement.same_inputs import digest_of
from smp_strategy.model.trace.user_code import is_own_object
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.routing import Placement

__all__ = ["EndlessError", "Rehearsal", "frozen"]

# Limit of calls and reads of all microbatches: loops that end depending on values may not end with made-up ones.
_MOST_EVENTS = 10_000
# Number of equal truth values in a row in a microbatch: loops that end by one (generation of text) end after these.
_SAME_TRUTHS = 16

# Number of elements, evenly distributed, that are compared of larger tensors.
_MOST_ELEMENTS = 1 << 20
# Limits for containers: compared entries of each, and levels of nesting.
_MOST_ENTRIES = 100
_MOST_LEVELS = 3
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class EndlessError(BaseException):
    """Endless loop in a rehearsed step; a ``BaseException``, so that user code does not swallow it."""


@final
class Rehearsal:
    """Dry run of microbatches that take turns as on a given stage.

    Args:
        stage: stage whose receives pause the microbatches; ``None``: they never pause.
        truth: made-up value of the first truth values.

    Attributes:
        noted: names of the events and plain arguments of calls, by microbatch, position, number of the argument (-1:
            the name) and stages that run the call.
        pause: called with the number of a microbatch that has to wait.
    """

    def __init__(self, stage: int | None, *, truth: bool) -> None:
        self.noted: dict[tuple[int, int, int, tuple[int, ...]], Any] = {}
        self.pause: Callable[[int], None] = lambda microbatch: None
        self._stage = stage
        self._truth = truth
        self._num_events = 0
        self._num_truths: Counter[int] = Counter()  # by microbatch

    def _count(self) -> None:
        self._num_events += 1
        if self._num_events > _MOST_EVENTS:
            raise EndlessError

    def note(
        self,
        microbatch: int,
        position: int,
        name: str,
        placement: Placement,
        leaves: list[Any],
        module: nn.Module | None = None,
    ) -> None:
        """Note the event ``name`` with arguments ``leaves`` at ``position``, and numbers that its ``module`` has."""
        self._count()
        self.noted[microbatch, position, -1, ()] = name
        for number, leaf in enumerate(leaves if module is None else [*leaves, _numbers_in(module)]):
            self.noted[microbatch, position, number, placement.stages] = frozen(leaf)

    def exchange(self, microbatch: int, placement: Placement) -> None:
        """Pause the microbatch if values would have to come to the stage for an event."""
        if any(move.target.stage == self._stage for move in placement.moves):
            self.pause(microbatch)

    def real(self, leaf: Any) -> Any:
        """The value that Python code sees of an argument, made up for a placed tensor."""
        self._count()
        if not isinstance(leaf, PlacedTensor):
            return leaf
        spec = leaf.spec
        if spec.dtype == torch.bool:
            number = self._num_truths[leaf.program.microbatch]
            self._num_truths[leaf.program.microbatch] += 1
            return torch.full(spec.size, self._truth ^ bool(number // _SAME_TRUTHS % 2))
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return torch.ones(spec.size, dtype=spec.dtype)
        # A different number for each microbatch and value, between 0 and 1.
        fraction = (0.5 + leaf.program.microbatch * 0.381966 + leaf.value.id * 0.618034) % 1.0
        return torch.full(spec.size, 0.1 + 0.8 * fraction, dtype=spec.dtype)


def _numbers_in(module: nn.Module) -> str:
    """Numbers in attributes of ``module``, which code above it may have set: a temperature, a rate of dropout."""
    attributes = (each for part in module.modules() for each in vars(part).items())
    return repr([each for each in attributes if type(each[1]) in (int, float, type(None)) and each[0][0] != "_"])


def frozen(value: Any, levels: int = _MOST_LEVELS) -> Any:
    """Comparable snapshot of ``value``; of an unknown object only its type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value) in (Tensor, np.ndarray):
        return digest_of(value, most=_MOST_ELEMENTS)
    if levels and isinstance(value, dict):
        inside = list(value.items())[-_MOST_ENTRIES:]
        return ("dict", len(value), tuple((repr(name), frozen(each, levels - 1)) for name, each in inside))
    if levels and isinstance(value, (list, tuple)):
        return ("list", len(value), tuple(frozen(each, levels - 1) for each in value[-_MOST_ENTRIES:]))
    if levels and is_own_object(value):
        return (type(value).__name__, frozen(vars(value), levels - 1))
    if isinstance(value, (set, frozenset)) and all(isinstance(each, _PLAIN) for each in value):
        return ("set", tuple(sorted(map(repr, value))))
    return type(value).__name__
