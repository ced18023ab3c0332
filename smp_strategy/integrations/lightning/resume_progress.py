"""Lightning's counters, put in order before a run goes on.

Lightning resumes with the batch or the epoch that follows, whatever was still to be done when the checkpoint was
written. A callback saves after a batch, but before the validation that is due then, the steps of schedulers that go by
metrics, and what hooks do at the end of the epoch; a run that `max_steps` has stopped counts the epoch as done; and
under `max_steps` Lightning trains on a batch too many after the end of an epoch. So that a resumed run does everything
once, it is said in the checkpoint how far the last batch has come (:func:`progress_of`), and what is missing is done
first, by the loop itself (:func:`do_due`).
"""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["do_due", "is_epoch_read", "progress_of", "put_in_order"]


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
