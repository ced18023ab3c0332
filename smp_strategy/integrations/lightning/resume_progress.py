"""Lightning's counters, put in order before a run goes on.

Lightning resumes with the batch or the epoch that follows, whatever was still to be done when the checkpoint was
written. A callback saves after a batch, but before the validation that is due then, the steps of schedulers that go by
metrics, and what hooks do at the end of the epoch; a run that `max_steps` has stopped counts the epoch as done; and
under `max_steps` Lightning trains on a batch too many after the end of an epoch. So that a resumed run does everything
once, it is said in the checkpoint how far the last batch has come (:func:`progress_of`), and what is missing is done
first, by the loop itself (:func:`do_due`).

A pass over data that was dealt out to so many ranks, gone on with by more or fewer of them.

Which samples a rank reads, in which order, depends on how many ranks share them. Samplers that deal out one order of
all samples (torch's DistributedSampler, which Lightning puts in) have read the first ``batches x batch size x ranks``
samples of it after so many batches, whoever has read which. So the others go on after as many of their own batches as
make up these samples::

    4 ranks, batches of 8        12 batches each: 384 samples
    2 ranks, batches of 16       12 batches each
    2 ranks, batches of 8        24 batches each

What has been logged in an epoch so far: means over an epoch that is interrupted are those of all of it.

Callbacks and schedulers may go by them, so they decide on weights as well. Lightning adds values up in metrics that it
makes when something is logged for the first time. So the sums of before are put in there just before the first value
is added.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "dealt_out_again",
    "do_due",
    "go_on_adding",
    "go_on_after",
    "is_epoch_read",
    "progress_of",
    "put_in_order",
    "sums_of",
]


def is_epoch_read(fit: Any) -> bool:
    """Whether the loop has used all batches of the epoch: the next pass begins anew."""
    return bool(fit.epoch_loop._num_ready_batches_reached())


def progress_of(fit: Any) -> dict[str, bool]:
    """What stands in a checkpoint, beside Lightning's own counters, about the moment of saving.

    ``is_read``: no batches of the epoch are left. ``has_validated``: that is done for the last batch. ``is_ended``:
    nothing is to be done any more for the last batch.
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


def put_in_order(fit: Any, progress: Mapping[str, bool]) -> None:
    """Set the counters of the loops, which Lightning has just read from a checkpoint.

    Args:
        fit: Lightning's fit loop.
        progress: see :func:`progress_of`.
    """
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


def do_due(fit: Any, progress: Mapping[str, bool], forget_gradients: Callable[[], None]) -> None:
    """Do what was due when the checkpoint was written, or let the loop do it; called when training starts.

    Args:
        fit: Lightning's fit loop.
        progress: see :func:`progress_of`.
        forget_gradients: called where Lightning would do so before validation; those that were read wait for the first
            step, out of its sight.
    """
    loop = fit.epoch_loop
    if fit.restarting:
        loop.advance = _First(fit, progress, forget_gradients)  # until it is called
        return
    loop.val_loop.restarting = False
    epochs = fit.epoch_progress.current
    if progress["is_read"] and fit.resumed_on_epoch_end:
        # The epoch was not complete yet: schedulers count those that are.
        epochs.completed -= 1
        loop._update_learning_rates(interval="epoch", update_plateau_schedulers=True)
        epochs.completed += 1


class _First:
    """What the loop does instead of its first batch: end the last one, if it was not ended."""

    def __init__(self, fit: Any, progress: Mapping[str, bool], forget_gradients: Callable[[], None]) -> None:
        self._fit = fit
        self._progress = progress
        self._forget_gradients = forget_gradients

    def __call__(self, data_fetcher: Any) -> None:
        loop = self._fit.epoch_loop
        del loop.advance
        self._fit._restarting = loop.restarting = False  # else schedulers pass over the end of this epoch
        if self._progress["is_ended"] and not is_epoch_read(self._fit):
            loop.advance(data_fetcher)
        elif self._progress["is_ended"] or self._progress["has_validated"]:
            loop._skip_next_val = True
        elif loop._should_check_val_fx(data_fetcher) and not loop._should_accumulate():
            self._forget_gradients()


def _set_restarting(fit: Any, value: bool) -> None:
    # The property of the fit loop says something else under `max_steps`.
    fit._restarting = value
    fit.epoch_loop.restarting = value
    fit.epoch_loop.val_loop.restarting = True  # validation is not tried out in the middle of a run


def dealt_out_again(
    places: Sequence[Mapping[str, Any] | None], batch_sizes: Sequence[int | None], num_before: int, num_now: int
) -> tuple[list[dict[str, Any] | None], str | None]:
    """Places of passes for another number of ranks.

    Args:
        places: of one of the ranks before, a place for each loader; see
            :meth:`~smp_strategy.integrations.data.resumable_loader.LoaderPass.place`.
        batch_sizes: that the loaders have now.
        num_before, num_now: ranks that share the samples.

    Returns:
        The places, ``None`` for a loader that begins anew, and what is not as it was, if anything.
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


def go_on_after(batches: Any, number: int) -> None:
    """Let Lightning's counter of the batches of this epoch say that there were so many."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, number)


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
