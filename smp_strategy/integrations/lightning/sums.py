"""What has been logged in an epoch so far: means over an epoch that is interrupted are those of all of it.

Callbacks and schedulers may go by them, so they decide on weights as well. Lightning adds values up in metrics that it
makes when something is logged for the first time. So the sums of before are put in there just before the first value
is added.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["go_on_adding", "sums_of"]

_STATES = ("value", "cumulated_batch_size")


def sums_of(results: Any) -> dict[str, dict[str, Any]]:
    """The sums of numbers that are logged per epoch.

    Args:
        results: Lightning's collection of them.
    """
    return {
        key: {name: getattr(metric, name).detach().cpu().clone() for name in _STATES if hasattr(metric, name)}
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def go_on_adding(results: Any, sums: Mapping[str, Mapping[str, Any]]) -> None:
    """Let what is logged next be added to ``sums``."""
    left = dict(sums)
    update = results.update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        kept = left.pop(key, None)
        if kept is not None and results[key].is_tensor:
            for name, number in kept.items():
                setattr(results[key], name, number.to(value.device))
        update(key, value, batch_size)
        if not left:
            del results.update_metrics

    if left:
        results.update_metrics = update_metrics
