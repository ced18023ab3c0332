"""Exact resumption: a resumed run sees the same batches and random numbers as an uninterrupted one.

Lightning's checkpoints have weights, optimizers, schedulers, callbacks and counters. The missing state stands beside
the engine's own, in a dict that plain Lightning ignores:

1. states of the ranks' random generators, and of the data stream ([Note: data stream]);
2. the position of each training data loader (:mod:`smp_strategy.engine.saving.resumable_loader`), and the number
   of batches that Lightning has fetched but not used (it prefetches one from a loader of unknown length);
3. the metrics that callbacks and schedulers monitor.

[Note: exact resume] The state is read together with the optimizers' state, after Lightning's counters, which are
corrected then (:mod:`smp_strategy.integrations.lightning.resume_progress`). It is applied when training starts, because
user code may draw random numbers in `setup`, and loaders may be iterated before; after that point nothing is drawn
until the loop takes its next action. An interrupted epoch continues at its position. After a complete epoch, the next
one begins with the restored generators, however many iterations Lightning has begun before.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.rank_generators import of_groups, of_rank, packed, set_of_rank, unpacked
from smp_strategy.engine.saving.resumable_loader import batch_size_of, generator_states, pass_of, set_generators
from smp_strategy.integrations.lightning.data import DataRngSync
from smp_strategy.integrations.lightning.resume_progress import (
    continue_sums,
    correct_counters,
    do_due_work,
    is_epoch_read,
    progress_of,
    redistribute_positions,
    set_batch_counters,
    sums_of,
)
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["CHECKPOINT_KEY", "KEY", "ResumeHooks", "Resumption"]

# Key of this state in the engine's part of a checkpoint.
KEY: Final = "resume"


class Resumption:
    """The state for exact resumption: collects it for a checkpoint, and applies it."""

    def __init__(self, stream: DataRngSync, device: torch.device, tree: Tree) -> None:
        self._rank = dist.get_rank()
        self._stream = stream
        self._data_ranks = [list(ranks) for ranks in stream.data_ranks]
        self._data_rank = next(number for number, ranks in enumerate(self._data_ranks) if self._rank in ranks)
        self._device = device
        self._tree = tree
        self._pending: Mapping[str, Any] | None = None
        self._pending_evaluation: list[list[torch.Tensor]] = []
        self._at_end: dict[str, Any] | None = None
        self._progress_at_end: dict[str, bool] | None = None

    @property
    def is_over(self) -> bool:
        """Whether training has ended."""
        return self._at_end is not None

    # To a checkpoint

    def collected(self, trainer: Any) -> dict[str, Any]:
        """The state for a checkpoint, on global rank 0; an empty dict elsewhere. Collective."""
        is_first = self._rank == self._data_ranks[self._data_rank][0]
        state, own = of_rank(self._device), self._of_data_rank(trainer) if is_first else None
        of_run = self._of_run(trainer)  # metrics may be reduced over ranks
        doing = "what a run needs to go on"
        states, passes, others = of_groups(state, own, self._data_ranks, doing, on_first=True)
        if self._rank != 0:
            return {}
        if self._pending is not None:  # no training step has run since it was read
            return dict(self._pending[KEY])
        return {
            "data_ranks": self._data_ranks,
            "by_data_rank": [{"generators": state, **of_pass} for state, of_pass in zip(states, passes, strict=True)],
            "generators_of_others": others,
            **of_run,
        }

    def _of_data_rank(self, trainer: Any) -> dict[str, Any]:
        return {
            "stream": packed(self._stream.state()),
            "sums": {} if is_epoch_read(trainer.fit_loop) else sums_of(trainer.fit_loop.epoch_loop._results),
            **(self._at_end or self._places(trainer)),
        }

    def _places(self, trainer: Any) -> dict[str, Any]:
        """Positions of the training loaders, and generators of all loaders."""
        fit = trainer.fit_loop
        loaders, evaluated = _loaders(fit), _loaders(fit.epoch_loop.val_loop)
        found: dict[str, Any] = {
            "loaders": None,
            "generators_of_loaders": list(map(generator_states, loaders)),
            "generators_of_evaluation": list(map(generator_states, evaluated)),
        }
        fetcher = fit._data_fetcher
        if fetcher is not None and fetcher.iterator is not None and not is_epoch_read(fit):
            num_unused = max(fetcher.fetched - fit.epoch_loop.batch_progress.current.processed, 0)
            found["loaders"] = [_place(loader, num_unused) for loader in loaders]
            found["are_consumed"] = list(getattr(fit._combined_loader._iterator, "_consumed", []))
        return found

    def _of_run(self, trainer: Any) -> dict[str, Any]:
        fit = trainer.fit_loop
        metrics = dict(trainer.callback_metrics)
        if is_epoch_read(fit):  # Lightning publishes those of the epoch at its end
            metrics |= fit.epoch_loop._results.metrics(on_step=False)["callback"]
        return {
            "metrics": {name: value.detach().cpu() for name, value in metrics.items()},
            "progress": self._progress_at_end or progress_of(fit),
            "last_reload_epoch": fit._last_train_dl_reload_epoch if trainer.reload_dataloaders_every_n_epochs else None,
        }

    def training_ends(self, trainer: Any) -> None:
        """Remember the positions of the loaders, which Lightning drops now: a checkpoint may follow."""
        self._at_end = self._places(trainer)
        self._progress_at_end = progress_of(trainer.fit_loop)

    # From a checkpoint

    def read(self, state: Mapping[str, Any], trainer: Any) -> None:
        """Keep the engine's part of a checkpoint until training starts; Lightning has read its counters by now."""
        self._pending = state
        correct_counters(trainer.fit_loop, state[KEY]["progress"])
        places = self._mine(state[KEY])["loaders"]
        if places is not None:  # Lightning has those of global rank 0
            states = [place["loader"] for place in places if place is not None and "loader" in place]
            trainer.fit_loop._combined_loader_states_to_load = states
        # Lightning warns of loaders without a `state_dict`; these are resumed here.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def training_starts(self, trainer: Any, forget_gradients: Callable[[], None]) -> Mapping[str, Any] | None:
        """Apply the state that was read, and return it; ``None`` without one. See [Note: exact resume].

        ``forget_gradients`` discards the accumulated gradients that were read.
        """
        self._at_end = self._progress_at_end = None
        own, self._pending = self._pending, None
        if own is None:
            return None
        state = own[KEY]
        mine, fit = self._mine(state), trainer.fit_loop
        loaders = _loaders(fit)
        for loader, states in zip(loaders, mine["generators_of_loaders"], strict=False):
            set_generators(loader, states)
        self._pending_evaluation = list(mine["generators_of_evaluation"])
        for loader in _loaders(fit.epoch_loop.val_loop):
            self.set_evaluation(loader)
        if trainer.current_epoch > 0 and any(getattr(loader, "persistent_workers", False) for loader in loaders):
            self._warn(
                "Persistent workers keep their random generators from epoch to epoch, and have new ones now: a dataset "
                "that draws random numbers in them draws others than it would have. Use `persistent_workers=False`, "
                "or draw from a generator that is seeded by epoch and sample."
            )
        self._set_passes(fit, loaders, mine, len(state["by_data_rank"]))
        is_same = state["data_ranks"] == self._data_ranks
        exception = state["generators_of_others"].get(self._rank) if is_same else None
        set_of_rank(mine["generators"] if exception is None else exception, self._device)
        self._stream.set_state(unpacked(mine["stream"]))
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        if is_same:
            continue_sums(fit.epoch_loop._results, mine["sums"])
        if mine["loaders"] is not None:
            if state["last_reload_epoch"] is not None:
                fit._last_train_dl_reload_epoch = state["last_reload_epoch"]
            self._fetch_ahead(fit._data_fetcher)
        is_overridden = self._tree.pytorch("utilities.model_helpers").is_overridden
        keeps = is_overridden("on_validation_model_zero_grad", trainer.lightning_module)
        do_due_work(fit, state["progress"], (lambda: None) if keeps else forget_gradients)
        return own

    def set_evaluation(self, loader: Any) -> None:
        """Restore the generators of the next validation loader; loaders are made at their first use."""
        if self._pending_evaluation:
            set_generators(loader, self._pending_evaluation.pop(0))

    def _mine(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The saved state of the data rank that read this rank's samples, if the number of data ranks is the same."""
        found: Mapping[str, Any] = state["by_data_rank"][self._data_rank % len(state["by_data_rank"])]
        return found

    def _set_passes(self, fit: Any, loaders: Sequence[Any], mine: Mapping[str, Any], num_before: int) -> None:
        places = mine["loaders"]
        if places is not None:
            places = self._places_for(fit, loaders, places, num_before)
        for number, loader in enumerate(loaders):
            found, place = pass_of(loader), None if places is None else places[number]
            if found is not None and place is not None:
                found.go_on(place)
            elif found is not None:
                found.begin_again()
        if places is None:
            fit._resuming_from_checkpoint = False  # else the loop would use an iteration that it began before
        elif mine["are_consumed"]:
            fit._combined_loader._iterator._consumed = list(mine["are_consumed"])

    def _places_for(
        self, fit: Any, loaders: Sequence[Any], places: Sequence[Any], num_before: int
    ) -> Sequence[Any] | None:
        if len(places) != len(loaders):
            self._warn(
                f"The checkpoint was written in the middle of an epoch over {len(places)} training data loaders, but "
                f"there are {len(loaders)} now: they begin anew. Use as many as before to go on with the same data."
            )
            return None
        num_now = len(self._data_ranks)
        if num_now == num_before:
            return places
        found, told = redistribute_positions(places, [batch_size_of(loader) for loader in loaders], num_before, num_now)
        lengths = [place["num_given"] for place in found if place is not None]
        if lengths:
            set_batch_counters(fit.epoch_loop.batch_progress, max(lengths))
        self._warn(
            f"The checkpoint was written in the middle of an epoch whose samples {num_before} ranks shared; now "
            f"{num_now} share them. The run goes on after {max(lengths, default=0)} batches of each"
            f"{'' if told is None else f' ({told})'}. A sampler that deals out one order of all samples "
            "(`DistributedSampler`) gives those that were not read yet; another one may give others. Resume with as "
            "many replicas, or from the end of an epoch, for exactly the same data."
        )
        return found

    def _warn(self, text: str) -> None:
        self._tree.pytorch("utilities.rank_zero").rank_zero_warn(text)

    def _fetch_ahead(self, fetcher: Any) -> None:
        """Fetch again the batches that the loop had prefetched."""
        fetcher.reset()
        if fetcher.length is None:
            step = self._tree.pytorch("loops.fetchers")._DataFetcher.__next__
            for _ in range(fetcher.prefetch_batches):
                try:
                    fetcher.batches.append(step(fetcher))
                except StopIteration:
                    break


def _loaders(loop: Any) -> list[Any]:
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def _place(loader: Any, num_unused: int) -> dict[str, Any] | None:
    found = pass_of(loader)
    if found is not None:
        return found.place(num_unused)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return {"loader": loader.state_dict()}
    return None


# Keys of the engine's own state in a checkpoint; plain Lightning ignores both.
CHECKPOINT_KEY: Final = "smp_strategy"
_GRADIENTS: Final = "gradients"


@final
class ResumeHooks:
    """The strategy's part of exact resumption: adds the extra state to checkpoints and applies it.

    Attributes:
        has_stepped: under manual optimization, whether an optimizer has used the gradients of the last batch.
    """

    def __init__(
        self, config: Callable[[], SMPConfig], engine: Callable[[], Engine], trainer: Callable[[], Any]
    ) -> None:
        self._config = config
        self._engine = engine
        self._trainer = trainer
        self._resumption: Resumption | None = None
        self.has_stepped = True

    def begin_run(self, resumption: Resumption | None) -> None:
        """Serve a new run; ``None`` for one that does not train."""
        self._resumption = resumption

    @property
    def _is_accumulating(self) -> bool:
        """Whether the next batches add to the gradients of the last ones."""
        if self._resumption is None or self._resumption.is_over:
            return False
        trainer = self._trainer()
        if not trainer.lightning_module.automatic_optimization:
            return not self.has_stepped
        return bool(trainer.fit_loop._should_accumulate())

    def add_state(self, checkpoint: dict[str, Any], full_gradients: Callable[[], dict[str, Any]]) -> None:
        """Add the state that plain Lightning ignores; it is complete on global rank 0. Collective."""
        engine = self._engine()
        own: dict[str, Any] = {**engine.saved.state_dict(), "layout": engine.mesh.shape.degrees}
        if self._resumption is not None and "callbacks" in checkpoint:  # more than weights
            own[KEY] = self._resumption.collected(self._trainer())
            if self._is_accumulating and self._config().state_dict_type == "sharded":
                checkpoint[_GRADIENTS] = engine.saved.held_state((), gradients=True).get(_GRADIENTS, {})
            elif self._is_accumulating:
                checkpoint[_GRADIENTS] = full_gradients()
        checkpoint[CHECKPOINT_KEY] = own

    def load_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Load that state. Call it after Lightning's counters have been read."""
        own = checkpoint.get(CHECKPOINT_KEY)
        if own is None:
            return
        engine = self._engine()
        engine.saved.load_state(own)
        if self._resumption is not None and KEY in own:
            self._resumption.read(own, self._trainer())
        if _GRADIENTS in checkpoint:
            engine.saved.load_stored_gradients({_GRADIENTS: checkpoint[_GRADIENTS]})

    def restore_evaluation_loader(self, loader: Any) -> None:
        """Restore the generators of a validation loader that Lightning has just made."""
        if self._resumption is not None and self._trainer().validating:
            self._resumption.set_evaluation(loader)

    def on_train_start(self) -> None:
        """Continue with the data and the random numbers of an earlier run. See [Note: exact resume]."""
        if self._resumption is not None:
            engine = self._engine()
            own = self._resumption.training_starts(self._trainer(), lambda: engine.saved.load_gradients({}))
            if own is not None:
                engine.saved.load_state(dict(own))  # a trial of validation has counted its batches

    def on_train_end(self) -> None:
        """Remember the positions of the loaders, which Lightning drops now."""
        if self._resumption is not None:
            self._resumption.training_ends(self._trainer())
