"""Resuming in the middle of an epoch: Lightning's progress counters, data positions and epoch means.

*Counters.* Lightning resumes with the next batch or epoch, whatever was still due when the checkpoint was written. A
callback saves after a batch, but before the validation, metric-driven scheduler steps and epoch-end hooks that are due
then. A run that `max_steps` has stopped counts the epoch as done, and under `max_steps` Lightning trains on one batch
too many after the end of an epoch. So the checkpoint records the progress of the last batch (:func:`progress_of`), and
a resumed run first lets the loop do the missing work (:func:`do_due_work`): everything happens once.

*Data positions with another number of data-parallel ranks* (:func:`redistribute_positions`). Samplers that divide one
order of all samples (torch's DistributedSampler, Lightning's default) have consumed its first ``batches x batch size x
ranks`` samples, whichever rank has read which. The new ranks skip as many batches as make up these samples::

    4 ranks, batches of 8        12 batches each: 384 samples
    2 ranks, batches of 16       12 batches each
    2 ranks, batches of 8        24 batches each

*Epoch means* (:func:`sums_of`). Means over an interrupted epoch cover all of it, since callbacks and schedulers monitor
them. Lightning accumulates in metrics that it makes at the first ``log`` call, so the saved sums are inserted just
before the first value is added.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "redistribute_positions",
    "do_due_work",
    "continue_sums",
    "set_batch_counters",
    "is_epoch_read",
    "progress_of",
    "correct_counters",
    "sums_of",
]


def is_epoch_read(fit: Any) -> bool:
    """Whether the loop has used all batches of the epoch."""
    return bool(fit.epoch_loop._num_ready_batches_reached())


def progress_of(fit: Any) -> dict[str, bool]:
    """The progress of the last batch at the moment of saving, in addition to Lightning's own counters.

    ``is_read``: no batches of the epoch are left. ``has_validated``: validation after the last batch is complete.
    ``is_ended``: nothing is due any more for the last batch.
    """
    loop, trainer = fit.epoch_loop, fit.trainer
    progress = loop.batch_progress
    is_in_batch = progress.current.completed < progress.current.processed
    return {
        "is_read": is_epoch_read(fit),
        "has_validated": trainer.validating and _is_complete(loop.val_loop),
        "is_ended": not is_in_batch and not trainer.validating,
    }


def _is_complete(val_loop: Any) -> bool:
    done = val_loop.batch_progress.current.completed
    return bool(val_loop.batch_progress.is_last_batch and done >= 1) or done >= sum(val_loop.max_batches)


def correct_counters(fit: Any, progress: Mapping[str, bool]) -> None:
    """Correct the counters of the loops, which Lightning has just read, by what :func:`progress_of` says."""
    epochs, batches = fit.epoch_progress, fit.epoch_loop.batch_progress
    is_over = epochs.current.processed == epochs.current.started
    if progress["is_read"] and is_over:
        _set_restarting(fit, False)
        return
    if batches.current.processed == 0:
        for counter in (epochs.total, epochs.current):
            counter.ready = counter.started = counter.processed
        _set_restarting(fit, False)
        return
    if is_over:  # `max_steps` has stopped the run
        for counter in (epochs.total, epochs.current):
            counter.processed = counter.completed = counter.started - 1
    if batches.current.completed < batches.current.processed:
        batches.increment_completed()
    _set_restarting(fit, True)


def do_due_work(fit: Any, progress: Mapping[str, bool], forget_gradients: Callable[[], None]) -> None:
    """Do the work that was due when the checkpoint was written, or let the loop do it. Call it when training starts.

    ``forget_gradients`` discards the gradients that were read, at the point where Lightning zeroes them before
    validation; they are set aside until the first step, where Lightning does not see them.
    """
    loop = fit.epoch_loop
    if fit.restarting:
        loop.advance = _First(fit, progress, forget_gradients)  # until it is called
        return
    loop.val_loop.restarting = False
    epochs = fit.epoch_progress.current
    if progress["is_read"] and fit.resumed_on_epoch_end:
        # The epoch was not complete yet, and schedulers count completed epochs.
        epochs.completed -= 1
        loop._update_learning_rates(interval="epoch", update_plateau_schedulers=True)
        epochs.completed += 1


class _First:
    """Replacement of the loop's first ``advance``: completes the last batch if it was not complete."""

    def __init__(self, fit: Any, progress: Mapping[str, bool], forget_gradients: Callable[[], None]) -> None:
        self._fit = fit
        self._progress = progress
        self._forget_gradients = forget_gradients

    def __call__(self, data_fetcher: Any) -> None:
        loop = self._fit.epoch_loop
        del loop.advance
        self._fit._restarting = loop.restarting = False  # otherwise schedulers skip the end of this epoch
        if self._progress["is_ended"] and not is_epoch_read(self._fit):
            loop.advance(data_fetcher)
        elif self._progress["is_ended"] or self._progress["has_validated"]:
            loop._skip_next_val = True
        elif loop._should_check_val_fx(data_fetcher) and not loop._should_accumulate():
            self._forget_gradients()


def _set_restarting(fit: Any, value: bool) -> None:
    # The private attribute, because the fit loop's property depends on `max_steps`.
    fit._restarting = value
    fit.epoch_loop.restarting = value
    fit.epoch_loop.val_loop.restarting = True  # Lightning then skips the sanity check


def redistribute_positions(
    places: Sequence[Mapping[str, Any] | None], batch_sizes: Sequence[int | None], num_before: int, num_now: int
) -> tuple[list[dict[str, Any] | None], str | None]:
    """Convert positions of data loaders, one of each, to another number of data-parallel ranks.

    Returns:
        The positions (``None`` for a loader that starts from the beginning), and a text about deviations, if any.
    """
    found: list[dict[str, Any] | None] = []
    left_over, unknown = 0, 0
    for place, batch_size in zip(places, batch_sizes, strict=True):
        before = None if place is None else place.get("batch_size")
        if place is None or before is None or batch_size is None:
            found.append(None)
            unknown += 1
            continue
        samples = (place["num_given"] - place["num_unused"]) * before * num_before
        number, left = divmod(samples, batch_size * num_now)
        left_over += left
        own = {name: value for name, value in place.items() if name != "loader"}
        found.append({**own, "num_given": number, "num_unused": 0, "is_of_others": True})
    told = []
    if left_over:
        told.append(f"{left_over} samples are no whole batch of each rank now, and are read again")
    if unknown:
        told.append(f"{unknown} loaders, of which nobody knows how large their batches are, begin their epoch anew")
    return found, "; ".join(told) or None


def set_batch_counters(batches: Any, number: int) -> None:
    """Set Lightning's batch counters of this epoch to ``number``."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, number)


_STATES = ("value", "cumulated_batch_size")


def sums_of(results: Any) -> dict[str, dict[str, Any]]:
    """The accumulated sums of values that are logged per epoch, in Lightning's collection of logged metrics."""
    return {
        key: {name: getattr(metric, name).detach().cpu().clone() for name in _STATES if hasattr(metric, name)}
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def continue_sums(results: Any, sums: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the next logged values to ``sums``."""
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
