"""The value of a metric for the whole batch, although its ``forward`` sees one microbatch after the other.

Where ``self.log`` is given a metric object, Lightning shows what its last ``forward`` has returned. Here that would be
the value of the last microbatch, so the calls of ``forward`` are noted, and after the step those of all microbatches
become one: the metric starts anew, sees the samples of all of them, and computes. What it has gathered before stays.

Which calls belong together? A metric object that is logged stands for its last ``forward`` in that microbatch, so
those that came last before the same ``self.log`` of each microbatch do. When the step is over, each metric has the
value of the last ``forward`` of all microbatches.

How does it see the samples again? Where the states of parts of a batch can be added up (sums, smallest, largest, lists
of samples; ``full_state_update=False``), torchmetrics does that itself in ``forward``, and these states are kept. From
any other metric (means of means, wrappers, metrics that look at what they had) the arguments are kept until the step is
over, and it is updated with them again, one microbatch after the other, as ``update`` would have it.
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

from smp_strategy.distributed.rng_state import global_state, set_global_state

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
"""Gives all stages the value that a metric has on the one that runs it."""


@dataclass(eq=False)
class Forward:
    """One call of ``forward`` with the samples of one microbatch."""

    metric: Metric
    """Whose ``forward`` it was."""
    state: dict[str, Any] | None = None
    """What it has gathered from these samples alone, if that can be added up."""
    arguments: tuple[Any, Any] | None = None
    """What it was called with, otherwise."""
    value: Any = None
    """What Lightning would show."""


class NotedForwards:
    """The calls of ``forward`` in one microbatch; its thread notes them while this is open."""

    def __init__(self) -> None:
        self.last: dict[int, Forward] = {}  # by `id`: metrics are equal, and have hashes, by their states
        self._running: list[Forward] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Note what this thread calls."""
        _here.noted = self
        try:
            yield
        finally:
            del _here.noted

    @contextmanager
    def during(self, forward: Forward) -> Iterator[None]:
        """``forward`` runs."""
        self._running.append(forward)
        try:
            yield
        finally:
            self._running.pop()
        self.last[id(forward.metric)] = forward

    def see_state(self, metric: Metric) -> None:
        """``metric`` computes; inside of its own ``forward`` it has the samples of this microbatch alone."""
        if self._running and self._running[-1].metric is metric and self._running[-1].arguments is None:
            self._running[-1].state = metric._copy_state_dict()


def noted_forward(metric: Metric, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of ``metric``, noted where microbatches are."""

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
    """``metric`` is about to compute in this thread."""
    noted: NotedForwards | None = getattr(_here, "noted", None)
    if noted is not None:
        noted.see_state(metric)


def is_settling() -> bool:
    """Whether a metric is computed here for a whole batch, from what this rank has noted."""
    return getattr(_here, "is_settling", False)


def _adds_up(metric: Metric) -> bool:
    """Whether torchmetrics itself adds states of parts of the samples up in this metric's ``forward``."""
    return (
        type(metric).forward is Metric.forward
        and metric.full_state_update is False
        and not metric.dist_sync_on_step
        and bool(metric._defaults)
        and all(reduction in _ADDING_UP for reduction in metric._reductions.values())
    )


@dataclass(eq=False)
class NotedMetric:
    """A metric object that was logged, and what it stood for."""

    metric: Metric
    forwards: list[Forward] = field(default_factory=list)
    """Its last call in each microbatch."""
    value: Any = None
    """What Lightning would show without them."""

    @classmethod
    def now(cls, metric: Metric) -> "NotedMetric":
        """``metric`` is logged by this thread."""
        noted: NotedForwards | None = getattr(_here, "noted", None)
        forward = noted.last.get(id(metric)) if noted is not None else None
        return cls(metric, [] if forward is None else [forward], metric._forward_cache)

    @classmethod
    def merged(cls, members: Sequence["NotedMetric"]) -> "NotedMetric":
        """What the microbatches have logged, as one."""
        forwards = [forward for member in members for forward in member.forwards]
        return cls(members[0].metric, forwards, members[-1].value)

    def settle(self, share: ShareValue) -> Metric:
        """The metric, which shows the value of the whole batch from now on."""
        value = value_of(self.forwards) if self.forwards else self.value
        self.metric._forward_cache = share(self.metric, value)
        return self.metric


def settle(noted: Sequence[NotedForwards]) -> None:
    """Let each metric show the value of its last ``forward`` in all microbatches of a step."""
    for key in dict.fromkeys(key for each in noted for key in each.last):
        forwards = [each.last[key] for each in noted if key in each.last]
        forwards[0].metric._forward_cache = value_of(forwards)


def value_of(forwards: Sequence[Forward]) -> Any:
    """What ``forward`` of one metric returns with the samples of all ``forwards``."""
    if len(forwards) == 1 or forwards[0].value is None:  # None: a metric that shows nothing
        return forwards[0].value
    metric = forwards[0].metric
    drawn = global_state()
    with _emptied(metric):
        if all(forward.state is not None for forward in forwards):
            _add_up(metric, forwards)
        else:
            for forward in forwards:
                assert forward.arguments is not None
                args, kwargs = forward.arguments
                metric.update(*args, **kwargs)
        value = metric.compute()
    set_global_state(drawn)
    return value


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
    """In here ``metric``, and those that it wraps, have seen nothing; afterwards all are as before."""
    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    before = [dict(vars(part)) for part in parts]
    try:
        for part in parts:
            own = vars(part)
            # Other metrics of a collection may have the same lists.
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
