"""Checkpoints for resuming a run: ``save_state`` and ``load_state``.

With ``state_dict_type="full"`` the folder has the files of plain Accelerate: whole tensors under plain names. So either
library resumes from checkpoints of the other. Two small files are added:
:data:`~smp_strategy.integrations.accelerate.saving.OWN_FILE`, with the random streams of the engine and the generators
of ranks that do not draw like the others of their pipeline, and a manifest with digests of all files.

With ``"sharded"`` all ranks write the partitioned model, and the optimizers that train it, to the subfolder
:data:`~smp_strategy.engine.saving.saved_models.state_folders.SHARDED`; everything else is as before. Any run reads
either form.

With ``async_save`` large states are copied to host memory; a thread writes them and moves the folder to its place.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

from accelerate.logging import get_logger
from accelerate.utils import OPTIMIZER_NAME, SAFE_MODEL_NAME, clean_state_dict_for_safetensors
from torch import nn

from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.engine.saving.saved_models.shared_states import snapshot
from smp_strategy.engine.saving.saved_models.spread_saving import FileNotes, SpreadModel
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.integrations.accelerate import rng_files, state_files
from smp_strategy.integrations.accelerate.optimizer import is_optimizer, leave_file, unwrapped
from smp_strategy.integrations.accelerate.saving import OWN_FILE, SavingHooks

__all__ = ["StateFolderHooks"]

logger = get_logger(__name__)

Job = Callable[[], None]


class StateFolderHooks(SavingHooks):
    """Methods of the Accelerator for checkpoints of a run."""

    # Saving

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Path:
        """Write a checkpoint to resume from. Collective.

        With ``async_save`` files are written while training continues: the folder appears when they are complete. The
        next ``save_state`` or ``load_state``, and ``end_training``, wait for that.

        Args:
            output_dir: the folder; with ``automatic_checkpoint_naming`` Accelerate's next one.
            safe_serialization: whether to write weights as safetensors.
            options: must be empty; Accelerate has them for other plugins.

        Returns:
            The folder.
        """
        if options:
            raise ConfigError(f"`save_state` has no options {sorted(options)} with SMPPlugin. Leave them out.")
        given = None if output_dir is None else os.fspath(output_dir)
        call = "accelerator.save_state"
        with self.smp.main_calls.together((call, "", given, safe_serialization), call):
            self.smp.settle()
            return self._smp_save_state(given, safe_serialization=safe_serialization)

    def _smp_take_part(self, call: tuple[Any, ...]) -> None:
        if call[0] == "accelerator.save_state":
            self.save_state(*call[2:])
        else:
            super()._smp_take_part(call)

    def _smp_save_state(self, output_dir: str | None, *, safe_serialization: bool) -> Path:
        """Write a checkpoint. Collective."""
        target = self.smp.main_calls.decided(lambda: self._smp_folder_to_write(output_dir))
        is_sharded = self.smp.calls is not None and self.smp.config.state_dict_type == "sharded"
        if is_sharded:
            self._smp_refuse_sharded()
        logger.info(f"Saving current state to {target}")
        with self._smp_begun(target) as staging:
            save = _FolderSave(staging, target, is_later=self.smp.config.async_save)
            self._smp_save_optimizers(save, is_sharded=is_sharded)
            self._smp_save_models(save, is_sharded=is_sharded, safe_serialization=safe_serialization)
            self._smp_save_rest(save)
            if is_sharded:
                self._smp_save_sharded(save)
            if save.is_later:
                self.smp.background.save(target, partial(self._smp_finish_later, save, target, self._smp_note()))
            else:
                with folders.writing(target):
                    self._smp_describe(staging)
                self._smp_move_in(staging, target, replaces=folders.STATES)
                with self.smp.main_calls.together(doing="deleting old checkpoints"):
                    self._smp_delete_oldest(target)
        self.project_configuration.iteration += 1
        return target

    def _smp_refuse_sharded(self) -> None:
        if self.project_configuration.save_on_each_node:
            raise ConfigError(
                '`state_dict_type="sharded"` lets all ranks write to one folder, which all nodes must share, so there '
                "is nothing that `save_on_each_node` could do. Leave that out."
            )
        if self._save_model_state_pre_hook:
            raise UnsupportedError(
                "Hooks of `register_save_state_pre_hook` are given whole weights, which no process has with "
                '`state_dict_type="sharded"`. Use "full", or remove the hooks.'
            )

    def _smp_save_optimizers(self, save: "_FolderSave", *, is_sharded: bool) -> None:
        """Save optimizers in full form, except those that go to the sharded folder. Collective."""
        for number, optimizer in enumerate(self._optimizers):
            if is_sharded and self._smp_engine_of(optimizer) is not None:
                continue
            path = save.folder / state_files.name(f"{OPTIMIZER_NAME}.bin", number)
            if self._smp_writes_together(save):
                self.write_optimizer_state_dict(optimizer, path)
                continue
            state = save.kept(self.get_optimizer_state_dict(optimizer))
            save.do(partial(self._smp_save, state, path))
            del state  # before the next is collected

    def _smp_writes_together(self, save: "_FolderSave") -> bool:
        """Whether ranks write one file together, so that none has the whole state: now, and on one node."""
        return not save.is_later and not self.project_configuration.save_on_each_node

    def _smp_save_models(self, save: "_FolderSave", *, is_sharded: bool, safe_serialization: bool) -> None:
        """Save weights in full form, numbered by model. Collective."""
        hooks = self._save_model_state_pre_hook  # which may write weights themselves, on every rank
        models = {
            number: model
            for number, model in enumerate(self._models)
            if not (is_sharded and self._smp_place(model) is not None)
        }
        if safe_serialization and not hooks and self._smp_writes_together(save):
            spread = {number: found for number, model in models.items() if (found := self._smp_spread(model))}
            for number, found in spread.items():
                _write_file(found, save.folder / state_files.name(f"{SAFE_MODEL_NAME}.safetensors", number))
                del models[number]
        whole = {
            number: self.get_state_dict(model) if hooks else self.get_written_state_dict(model)
            for number, model in models.items()
        }
        if hooks:
            weights = list(whole.values())
            with self._smp_known(weights), self.smp.main_calls.together(doing="running hooks of save_state"):
                for hook in hooks.values():
                    hook(self._models, weights, str(save.folder))
            whole = dict(enumerate(weights))
        each_node = self.project_configuration.save_on_each_node
        options = {"safe_serialization": safe_serialization, "save_on_each_node": each_node}
        # As one job: ranks may have different numbers of them, since hooks take out what they have written.
        kept = {number: save.kept(state) for number, state in whole.items()}
        save.do(partial(state_files.write_weights, kept, save.folder, **options))

    def _smp_save_rest(self, save: "_FolderSave") -> None:
        """Save small states and custom objects. Collective."""
        custom = [self._smp_state_of(each) for each in self._custom_objects]
        states, own = self._smp_streams()
        with folders.writing(save.target):
            if self._smp_writes:
                state_files.write(self, save.folder, custom)
            for rank, state in enumerate(states):
                self._smp_save(state, save.folder / rng_files.FILE.format(rank))
            self._smp_save(own, save.folder / OWN_FILE)

    def _smp_save_sharded(self, save: "_FolderSave") -> None:
        """Save the sharded folder, on all ranks. Collective."""
        saved = self.smp.engine.saved
        with self._smp_aside():
            prepared = saved.prepared(saved.held_state(unwrapped(self._smp_trained())), copy=save.is_later)
        save.do(partial(prepared.write, save.folder / folders.SHARDED, note=self._smp_note()))

    def _smp_trained(self) -> list[Any]:
        """Optimizers of the partitioned model."""
        return [each for each in self._optimizers if self._smp_engine_of(each) is not None]

    def _smp_note(self) -> dict[str, Any]:
        steps = self.smp.engine.saved.state_dict()["num_steps"] if self.smp.has_engine else 0
        return {"layout": self.smp.shape.degrees, "global_step": steps}

    def _smp_describe(self, staging: Path) -> None:
        if self._smp_writes:
            folders.describe(staging, self._smp_note())

    def _smp_finish_later(self, save: "_FolderSave", target: Path, note: dict[str, Any]) -> None:
        """Write all jobs in a thread. Ranks that write full files do so alone; shards are written by all ranks."""
        with folders.filling(save.folder, target, is_mine=self._smp_writes):
            for job in save.jobs:
                job()
            if self._smp_writes:
                folders.describe(save.folder, note)
                folders.move_in(save.folder, target, replaces=folders.STATES)
        self._smp_delete_oldest(target)

    def _smp_delete_oldest(self, target: Path) -> None:
        """Delete old checkpoints beyond the user's ``total_limit``."""
        naming = self.project_configuration
        if naming.automatic_checkpoint_naming and naming.total_limit is not None and self._smp_writes:
            for old in folders.delete_oldest(target.parent, naming.total_limit):
                logger.warning(f"Deleted {old} to make room for the new checkpoint.")

    # Loading

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Resume from a checkpoint of :meth:`save_state` or of plain Accelerate, under any layout. Collective.

        Files are verified first, if they have digests. No code in them is run.

        Args:
            input_dir: the folder; ``None``: the newest one, with ``automatic_checkpoint_naming``.
            load_kwargs: options of ``torch.load``, for optimizers, schedulers, data loaders and objects of the user.
                With ``{"weights_only": False}`` these files may run code: use it for trusted files only.
            options: ``strict``, for the names of weights; ``map_location``, which has no effect here.

        Raises:
            CheckpointError: a file is damaged, or names code.
        """
        unknown = sorted(options.keys() - {"strict", "map_location"})
        if unknown:
            raise ConfigError(f"`load_state` has no options {unknown} with SMPPlugin. Leave them out.")
        with self.smp.main_calls.together(meeting="accelerator.load_state"):
            self.smp.settle()
            self._smp_load_state(input_dir, load_kwargs or {}, strict=options.get("strict", True))

    def _smp_load_state(
        self, input_dir: str | os.PathLike[str] | None, load_kwargs: dict[str, Any], *, strict: bool
    ) -> None:
        """Load a checkpoint. Collective."""
        folder = self.smp.main_calls.decided(lambda: self._smp_folder_to_read(input_dir))
        logger.info(f"Loading states from {folder}")
        with self.smp.main_calls.together(doing=f"verifying {folder}"):
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} exists on rank 0, but not on rank {self.smp.rank}. Use a folder that all nodes share, "
                    "or save with `ProjectConfiguration(save_on_each_node=True)`."
                )
            if self.is_local_main_process:
                folders.verify(folder)
        with self.smp.main_calls.together(doing=f"loading from {folder}"):
            models = list(self._models)
            for hook in self._load_model_state_pre_hook.values():
                hook(models, str(folder))
            self._smp_load(folder, models, load_kwargs, strict=strict)
        if input_dir is None:
            # A run that was started again would count from 0: an error at a name that is there, and before that, new
            # checkpoints that `total_limit` takes for the oldest.
            naming = self.project_configuration
            naming.iteration = max(naming.iteration, folders.number_of(folder) + 1)

    def _smp_load(self, folder: Path, models: list[nn.Module], load_kwargs: dict[str, Any], *, strict: bool) -> None:
        """Load this rank's shard of ``folder``; hooks may have loaded some models already."""
        stored = self._smp_stored(folder)
        for number, model in enumerate(models):
            if stored is not None and self._smp_place(model) is not None:
                with self._smp_aside():
                    self.smp.engine.saved.load_stored(stored, strict=strict)
            else:
                self.load_model_state_dict(model, state_files.weights(folder, number), strict=strict)
        trained = [] if stored is None else self._smp_trained()
        for number, each in enumerate(unwrapped(trained)):
            assert stored is not None
            self.smp.engine.saved.load_stored_optimizer(stored, number, each)
        for number, optimizer in enumerate(self._optimizers):
            if optimizer in trained:
                continue
            path = folder / state_files.name(f"{OPTIMIZER_NAME}.bin", number)
            self.load_optimizer_state_dict(optimizer, state_files.state(path, "param_groups", **load_kwargs))
            leave_file(optimizer)
        state_files.read(self, folder, self.smp.data_rank, load_kwargs)
        for number, each in enumerate(self._custom_objects):
            state_files.read_custom(folder, number, partial(self._smp_load_into, each), load_kwargs)
        step = rng_files.step_in(folder)
        if step is not None:
            self.step = step
        if (folder / OWN_FILE).exists():
            self.load_own_state(state_files.state(folder / OWN_FILE))

    def _smp_stored(self, folder: Path) -> Any:
        """Open the sharded folder; ``None`` if the checkpoint has none."""
        if not (folder / folders.SHARDED).exists():
            return None
        if self.smp.calls is None:
            raise ConfigError(
                f"{folder} has the state of a model that was spread over ranks, but none is prepared here. Call "
                "`accelerator.prepare` with the model before `load_state`."
            )
        return folders.stored(folder)

    # Objects of the user

    def _smp_state_of(self, custom: Any) -> Any:
        """State of an object that was registered for checkpointing. Collective if it is a partitioned one."""
        if isinstance(custom, nn.Module):
            return self.get_written_state_dict(custom) if self._smp_place(custom) is not None else custom.state_dict()
        if is_optimizer(custom):
            return self.get_optimizer_state_dict(custom)
        return custom.state_dict()

    def _smp_load_into(self, custom: Any, state: Any) -> None:
        if isinstance(custom, nn.Module):
            self.load_model_state_dict(custom, state)
        elif is_optimizer(custom):
            self.load_optimizer_state_dict(custom, state)
        else:
            custom.load_state_dict(state)

    @contextmanager
    def _smp_known(self, weights: list[dict[str, Any]]) -> Iterator[None]:
        """Context in which the full state dicts are known, so that hooks may ask for them on a single rank."""
        known = {id(self.unwrap_model(model)): state for model, state in zip(self._models, weights, strict=True)}
        with ExitStack() as stack:
            for calls in self.smp.state_calls:
                if id(calls.model) in known:
                    stack.enter_context(calls.collected(known[id(calls.model)]))
            yield

    # Which folder

    def _smp_folder_to_write(self, given: str | os.PathLike[str] | None) -> Path:
        if self.project_configuration.automatic_checkpoint_naming:
            if self.project_dir is None:
                raise ConfigError(
                    "`automatic_checkpoint_naming` names folders in `project_dir`, which is not given. Set it: "
                    "`ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)`."
                )
            target = folders.to_write(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
            if target.exists():
                raise ValueError(
                    f"Checkpoint directory {target} ({self.save_iteration}) already exists. Please manually override "
                    "`accelerator.project_configuration.iteration` with what iteration to start with."
                )
            return target
        if given is None:
            raise ConfigError(
                "`save_state` needs `output_dir` unless `automatic_checkpoint_naming` is set. Name a folder."
            )
        return folders.to_write(given)

    def _smp_folder_to_read(self, given: str | os.PathLike[str] | None) -> Path:
        if given is not None:
            return folders.to_read(given)
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        return folders.newest(folders.to_write(self.project_dir) / "checkpoints")


def _write_file(model: SpreadModel, path: Path) -> None:
    """Write the weights to one file of safetensors, in a folder that global rank 0 sees. Collective."""
    state, entries = model.collected()
    notes = FileNotes(path.parent)
    notes.note(clean_state_dict_for_safetensors(entries), path, {"format": "pt"})
    state.write(notes.files, path.parent, writers=[0])


@final
class _FolderSave:
    """A checkpoint folder that will move to ``target``: it is filled now, or later by the :attr:`jobs` of a thread."""

    def __init__(self, folder: Path, target: Path, *, is_later: bool) -> None:
        self.folder, self.target, self.is_later = folder, target, is_later
        self.jobs: list[Job] = []

    def kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """Snapshot of ``state`` for later writing; ``state`` itself if it is written now."""
        return snapshot(state) if self.is_later else state

    def do(self, job: Job) -> None:
        """Run a write job, or queue it. Collective if it runs now."""
        if self.is_later:
            self.jobs.append(job)
        else:
            with folders.writing(self.target):
                job()
