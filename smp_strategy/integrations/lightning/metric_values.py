"""Batch values of metrics: merge the ``forward`` calls of all microbatches into the value of the whole batch.

If ``self.log`` gets a metric object, Lightning shows the value of its last ``forward``. Here that would be the value of
the last microbatch. So calls of ``forward`` are recorded, and after the step those of all microbatches are merged: the
metric is reset temporarily, sees all samples, and computes. Its accumulated state stays.

*Matching calls.* A logged metric stands for its last ``forward`` in that microbatch, so the last calls before the same
``self.log`` of each microbatch belong together. After the step, each metric has the value of its last ``forward`` over
all microbatches.

*Seeing the samples again.* If states can be merged (sum, min, max, concatenation; ``full_state_update=False``),
``forward`` of torchmetrics does so itself, and the state of each microbatch is kept. For any other metric (means of
means, wrappers, metrics whose update depends on their state) the arguments are kept until the end of the step, and
``update`` is called with those of one microbatch after the other.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from smp_strategy.engine.saving.rank_generators import undrawn

__all__ = [
    "Forward",
    "NotedForwards",
    "NotedMetric",
    "ShareValue",
    "is_settling",
    "noted_forward",
    "see_state",
    "settle",
]

_ADDING_UP = (dim_zero_sum, dim_zero_min, dim_zero_max, dim_zero_cat)
_here = threading.local()

ShareValue = Callable[[Metric, Any], Any]
"""Broadcasts the value of a metric from the stage that runs it to all stages."""


@dataclass(eq=False)
class Forward:
    """One call of ``forward`` with the samples of one microbatch."""

    metric: Metric
    """The metric."""
    state: dict[str, Any] | None = None
    """Its state from these samples alone, if states can be merged."""
    arguments: tuple[Any, Any] | None = None
    """The arguments of the call, otherwise."""
    value: Any = None
    """The value that Lightning would show."""


class NotedForwards:
    """Recorder of the ``forward`` calls in one microbatch, which runs in a thread of its own."""

    def __init__(self) -> None:
        self.last: dict[int, Forward] = {}  # by `id`: metrics are equal, and have hashes, by their states
        self._running: list[Forward] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record the calls of this thread."""
        _here.noted = self
        try:
            yield
        finally:
            del _here.noted

    @contextmanager
    def during(self, forward: Forward) -> Iterator[None]:
        """Mark ``forward`` as running."""
        self._running.append(forward)
        try:
            yield
        finally:
            self._running.pop()
        self.last[id(forward.metric)] = forward

    def see_state(self, metric: Metric) -> None:
        """Copy the state when ``metric`` computes: inside its ``forward`` it is that of this microbatch alone."""
        if self._running and self._running[-1].metric is metric and self._running[-1].arguments is None:
            self._running[-1].state = metric._copy_state_dict()


def noted_forward(metric: Metric, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` of ``metric`` to record its calls in microbatches."""

    def run(*args: Any, **kwargs: Any) -> Any:
        noted: NotedForwards | None = getattr(_here, "noted", None)
        if noted is None:
            return forward(*args, **kwargs)
        call = Forward(metric)
        if not _adds_up(metric):
            call.arguments = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        with noted.during(call):
            result = forward(*args, **kwargs)
        call.value = metric._forward_cache
        return result

    return run


def see_state(metric: Metric) -> None:
    """Tell the recorder of this thread that ``metric`` is about to compute."""
    noted: NotedForwards | None = getattr(_here, "noted", None)
    if noted is not None:
        noted.see_state(metric)


def is_settling() -> bool:
    """Whether this thread computes the value of a whole batch from recorded calls."""
    return getattr(_here, "is_settling", False)


def _adds_up(metric: Metric) -> bool:
    """Whether this metric's ``forward`` merges the state of its samples into the accumulated state."""
    return (
        type(metric).forward is Metric.forward
        and metric.full_state_update is False
        and not metric.dist_sync_on_step
        and bool(metric._defaults)
        and all(reduction in _ADDING_UP for reduction in metric._reductions.values())
    )


@dataclass(eq=False)
class NotedMetric:
    """A logged metric object with the calls that it stands for."""

    metric: Metric
    forwards: list[Forward] = field(default_factory=list)
    """Its last call in each microbatch."""
    value: Any = None
    """The value that Lightning would show without them."""

    @classmethod
    def now(cls, metric: Metric) -> "NotedMetric":
        """Record that this thread logs ``metric``."""
        noted: NotedForwards | None = getattr(_here, "noted", None)
        forward = noted.last.get(id(metric)) if noted is not None else None
        return cls(metric, [] if forward is None else [forward], metric._forward_cache)

    @classmethod
    def merged(cls, members: Sequence["NotedMetric"]) -> "NotedMetric":
        """Merge the records of all microbatches."""
        forwards = [forward for member in members for forward in member.forwards]
        return cls(members[0].metric, forwards, members[-1].value)

    def settle(self, share: ShareValue) -> Metric:
        """Set the metric's shown value to that of the whole batch, and return the metric."""
        value = value_of(self.forwards) if self.forwards else self.value
        self.metric._forward_cache = share(self.metric, value)
        return self.metric


def settle(noted: Sequence[NotedForwards]) -> None:
    """Set the shown value of each metric to that of its last ``forward`` over all microbatches of a step."""
    for key in dict.fromkeys(key for each in noted for key in each.last):
        forwards = [each.last[key] for each in noted if key in each.last]
        forwards[0].metric._forward_cache = value_of(forwards)


def value_of(forwards: Sequence[Forward]) -> Any:
    """The value of a metric's ``forward`` over the samples of all ``forwards``."""
    if len(forwards) == 1 or forwards[0].value is None:  # None: a metric that shows nothing
        return forwards[0].value
    metric = forwards[0].metric
    with undrawn(), _emptied(metric):
        if all(forward.state is not None for forward in forwards):
            _add_up(metric, forwards)
        else:
            for forward in forwards:
                assert forward.arguments is not None
                args, kwargs = forward.arguments
                metric.update(*args, **kwargs)
        return metric.compute()


def _add_up(metric: Metric, forwards: Sequence[Forward]) -> None:
    for number, forward in enumerate(forwards, 1):
        before = metric.metric_state
        assert forward.state is not None
        for name, value in forward.state.items():
            setattr(metric, name, value)
        metric._update_count = number
        if number > 1:
            metric._reduce_states(before)


@contextmanager
def _emptied(metric: Metric) -> Iterator[None]:
    """Reset ``metric``, and the metrics that it wraps, while this is open; restore their state afterwards."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    before = [dict(vars(part)) for part in parts]
    try:
        for part in parts:
            own = vars(part)
            # Metrics of a collection may share containers, so reset copies of them.
            own.update({name: copy.copy(value) for name, value in own.items() if isinstance(value, list | dict | set)})
            own.update(_to_sync=part.dist_sync_on_step, _should_unsync=False, compute_on_cpu=False)
        metric.reset()
        _here.is_settling = True
        yield
    finally:
        _here.is_settling = False
        for part, attributes in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
