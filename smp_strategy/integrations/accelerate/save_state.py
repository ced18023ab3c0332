"""What a run needs to go on, in a folder: ``save_state`` and ``load_state``.

With ``state_dict_type="full"`` the folder has what Accelerate writes without us, file by file: whole tensors under
plain names. So plain Accelerate goes on with it, and we go on with one of plain Accelerate. Two small files are added:
where the random streams of the engine are, and the generators of ranks that do not draw like the others of their
pipeline (:data:`~smp_strategy.integrations.accelerate.saving.OWN_FILE`), and a manifest with digests of all files.

With ``"sharded"`` the model that is spread, and the optimizers that train it, are written by all ranks to a folder in
it, :data:`~smp_strategy.integrations.accelerate.state_folders.SHARDED`, and everything else as before. Either is read
by any run.

With ``async_save`` whatever is large is copied to host memory, and written and moved to its place by a thread.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

from accelerate.logging import get_logger
from accelerate.utils import OPTIMIZER_NAME
from torch import nn

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage import folder_digests
from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.checkpoint.storage.fallback import previous
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.write_errors import saving
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.distributed.rendezvous import alike, meet
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import CheckpointError, ConfigError, UnsupportedError
from smp_strategy.integrations.accelerate import full_states as whole_states
from smp_strategy.integrations.accelerate import rng_files as random_states
from smp_strategy.integrations.accelerate import state_files
from smp_strategy.integrations.accelerate import state_folders as folders
from smp_strategy.integrations.accelerate.optimizer import unwrapped
from smp_strategy.integrations.accelerate.saving import OWN_FILE, SavingHooks

__all__ = ["StateFolderHooks"]

logger = get_logger(__name__)

Job = Callable[[], None]


class StateFolderHooks(SavingHooks):
    """See the module docstring."""

    _smp_background: BackgroundSave
    _smp_writer: tuple[Engine, ShardedWriter] | None = None

    def smp_settle(self) -> None:
        """See the hooks of saves in the background."""
        raise NotImplementedError

    # Saving

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Path:
        """Write what a run needs to go on. Collective.

        With ``async_save`` files are written while training goes on: the folder is there when they are complete. The
        next ``save_state`` or ``load_state``, and ``end_training``, wait for that.

        Args:
            output_dir: the folder; with ``automatic_checkpoint_naming`` Accelerate's next one.
            safe_serialization: whether to write weights as safetensors.
            options: none; they are for plugins of others.

        Returns:
            The folder.
        """
        meet("accelerator.save_state")
        if options:
            raise ConfigError(f"`save_state` has no options {sorted(options)} with SMPPlugin. Leave them out.")
        self.smp_settle()
        target = self._smp_told(lambda: self._smp_folder_to_write(output_dir))
        is_spread = self._smp_calls is not None and self.smp.config.state_dict_type == "sharded"
        if is_spread:
            self._smp_refuse_sharded()
        logger.info(f"Saving current state to {target}")
        with self._smp_begun(target) as staging:
            save = _Save(staging, f"saving to {target}", self.smp.stage_ranks, is_later=self.smp.config.async_save)
            self._smp_save_optimizers(save, is_spread=is_spread)
            self._smp_save_models(save, is_spread=is_spread, safe_serialization=safe_serialization)
            self._smp_save_rest(save)
            if is_spread:
                self._smp_save_spread(save)
            if save.is_later:
                self._smp_background.start(partial(self._smp_finish_later, save, target, self._smp_note()), f"{target}")
            else:
                with alike(save.doing):
                    self._smp_describe(staging)
                self._smp_move_in(staging, target, replaces=folders.STATES)
                with alike("deleting old checkpoints"):
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

    def _smp_save_optimizers(self, save: "_Save", *, is_spread: bool) -> None:
        """Those that are not spread, or shall be whole. Collective."""
        for number, optimizer in enumerate(self._optimizers):
            if is_spread and self._smp_engine_of(optimizer) is not None:
                continue
            state = save.kept(self.get_optimizer_state_dict(optimizer))
            save.do(partial(self._smp_save, state, save.folder / state_files.name(f"{OPTIMIZER_NAME}.bin", number)))
            del state  # before the next is collected

    def _smp_save_models(self, save: "_Save", *, is_spread: bool, safe_serialization: bool) -> None:
        """Weights by the numbers of their models. Collective."""
        hooks = self._save_model_state_pre_hook  # which may write weights themselves, on every rank
        whole = {
            number: self.get_state_dict(model) if hooks else self.get_written_state_dict(model)
            for number, model in enumerate(self._models)
            if not (is_spread and self._smp_place(model) is not None)
        }
        if hooks:
            weights = list(whole.values())
            with self._smp_known(weights), alike("running hooks of save_state"):
                for hook in hooks.values():
                    hook(self._models, weights, str(save.folder))
            whole = dict(enumerate(weights))
        each_node = self.project_configuration.save_on_each_node
        options = {"safe_serialization": safe_serialization, "save_on_each_node": each_node}
        # As one job: ranks may have different numbers of them, since hooks take out what they have written.
        kept = {number: save.kept(state) for number, state in whole.items()}
        save.do(partial(state_files.write_weights, kept, save.folder, **options))

    def _smp_save_rest(self, save: "_Save") -> None:
        """What is small, and custom objects. Collective."""
        custom = [self._smp_state_of(each) for each in self._custom_objects]
        states, own = self._smp_streams()
        with alike(save.doing):
            if self._smp_writes:
                state_files.write(self, save.folder, custom)
            for rank, state in enumerate(states):
                self._smp_save(state, save.folder / random_states.FILE.format(rank))
            self._smp_save(own, save.folder / OWN_FILE)

    def _smp_save_spread(self, save: "_Save") -> None:
        """What all ranks write together. Collective."""
        engine = self.smp.engine
        if self._smp_writer is None or self._smp_writer[0] is not engine:
            self._smp_writer = engine, ShardedWriter(engine.mesh.saving_group)
        with self._smp_aside():
            state = engine.saved.held_state(unwrapped(self._smp_trained()))
            prepared = self._smp_writer[1].prepare(state, copy=save.is_later)
        save.do(partial(prepared.write, save.folder / folders.SHARDED, note=self._smp_note()))

    def _smp_trained(self) -> list[Any]:
        """The optimizers of the model that is spread."""
        return [each for each in self._optimizers if self._smp_engine_of(each) is not None]

    def _smp_note(self) -> dict[str, Any]:
        steps = self.smp.engine.saved.state_dict()["num_steps"] if self.smp.has_engine else 0
        return {"layout": self.smp.shape.degrees, "global_step": steps}

    def _smp_describe(self, staging: Path) -> None:
        if self._smp_writes:
            folder_digests.describe(staging, self._smp_note())

    def _smp_finish_later(self, save: "_Save", target: Path, note: dict[str, Any]) -> None:
        """What is left to be done, in a thread: on ranks that write files alone that, and on all what they share."""
        try:
            with saving(target):
                for job in save.jobs:
                    job()
                if self._smp_writes:
                    folder_digests.describe(save.folder, note)
                    folders.move_in(save.folder, target, replaces=folders.STATES)
            if self._smp_writes:
                self._smp_delete_oldest(target)
        except BaseException:
            if self._smp_writes:
                folders.remove(save.folder)
            raise

    def _smp_delete_oldest(self, target: Path) -> None:
        """Keep as many checkpoints as the user wants."""
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
        """Go on from what :meth:`save_state` has written, or plain Accelerate, under this or another layout.

        Files are verified first, if they have digests. Nothing that stands in them is run.

        Collective.

        Args:
            input_dir: the folder; ``None``: the newest one, with ``automatic_checkpoint_naming``.
            load_kwargs: of ``torch.load``, for optimizers, schedulers, data loaders and objects of the user. With
                ``{"weights_only": False}`` these files may run code: only for files that one trusts.
            options: ``strict``, for the names of weights; ``map_location``, which makes no difference here.

        Raises:
            CheckpointError: a file is damaged, or names code.
        """
        meet("accelerator.load_state")
        unknown = sorted(options.keys() - {"strict", "map_location"})
        if unknown:
            raise ConfigError(f"`load_state` has no options {unknown} with SMPPlugin. Leave them out.")
        self.smp_settle()
        folder = self._smp_told(lambda: self._smp_folder_to_read(input_dir))
        logger.info(f"Loading states from {folder}")
        with alike(f"verifying {folder}"):
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} exists on rank 0, but not on rank {self.smp.rank}. Use a folder that all nodes share, "
                    "or save with `ProjectConfiguration(save_on_each_node=True)`."
                )
            if self.is_local_main_process:
                _verify(folder)
        with alike(f"loading from {folder}"):
            models = list(self._models)
            for hook in self._load_model_state_pre_hook.values():
                hook(models, str(folder))
            self._smp_load(folder, models, load_kwargs or {}, strict=options.get("strict", True))

    def _smp_load(self, folder: Path, models: list[nn.Module], load_kwargs: dict[str, Any], *, strict: bool) -> None:
        """This rank's share of what is in ``folder``; hooks may have loaded some models."""
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
            self.load_optimizer_state_dict(optimizer, state_files.mapped(path, **load_kwargs))
            whole_states.leave_file(optimizer)
        state_files.read(self, folder, self.smp.data_rank, load_kwargs)
        for number, each in enumerate(self._custom_objects):
            state_files.read_custom(folder, number, partial(self._smp_load_into, each), load_kwargs)
        step = random_states.step_in(folder)
        if step is not None:
            self.step = step
        if (folder / OWN_FILE).exists():
            self.load_own_state(state_files.mapped(folder / OWN_FILE))

    def _smp_stored(self, folder: Path) -> CheckpointReader | None:
        """What ranks have written together, if they have."""
        if not (folder / folders.SHARDED).exists():
            return None
        if self._smp_calls is None:
            raise ConfigError(
                f"{folder} has the state of a model that was spread over ranks, but none is prepared here. Call "
                "`accelerator.prepare` with the model before `load_state`."
            )
        stored = CheckpointReader.open(folder / folders.SHARDED)
        stored.rest()  # there is nothing in it, but damage should be said
        return stored

    # Objects of the user

    def _smp_state_of(self, custom: Any) -> Any:
        """That of an object which was registered for checkpointing. Collective if it is one that is spread."""
        if isinstance(custom, nn.Module):
            return self.get_written_state_dict(custom) if self._smp_place(custom) is not None else custom.state_dict()
        if whole_states.is_optimizer(custom):
            return self.get_optimizer_state_dict(custom)
        return custom.state_dict()

    def _smp_load_into(self, custom: Any, state: Any) -> None:
        if isinstance(custom, nn.Module):
            self.load_model_state_dict(custom, state)
        elif whole_states.is_optimizer(custom):
            self.load_optimizer_state_dict(custom, state)
        else:
            custom.load_state_dict(state)

    @contextmanager
    def _smp_known(self, weights: list[dict[str, Any]]) -> Iterator[None]:
        """In here the state dict of the model is known, to hooks that ask for it on one rank only."""
        known = {id(self.unwrap_model(model)): state for model, state in zip(self._models, weights, strict=True)}
        with ExitStack() as stack:
            for calls in self._smp_state_calls:
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
            target = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
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
        return Path(given)

    def _smp_folder_to_read(self, given: str | os.PathLike[str] | None) -> Path:
        if given is not None:
            folder = Path(given).expanduser()
            commit.recover(folder)
            if not folder.is_dir():
                raise ValueError(f"Tried to find {folder} but folder does not exist")
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        return folders.newest(Path(self.project_dir) / "checkpoints")


def _verify(folder: Path) -> None:
    try:
        folder_digests.verify(folder)
    except CheckpointError as error:
        other = previous(folder)
        found = "There is no undamaged one" if other is None else f"The newest undamaged one is {other}"
        raise CheckpointError(f"{error} {found} beside it.") from None


@final
class _Save:
    """A folder that is being written: at once, or later by a thread.

    Args:
        folder: is there.
        doing: what is being done, for messages.
        ranks: those of this one's pipeline.
        is_later: whether :attr:`jobs` collects what is to be done.
    """

    def __init__(self, folder: Path, doing: str, ranks: list[int], *, is_later: bool) -> None:
        self.folder, self.doing, self.is_later = folder, doing, is_later
        self._ranks = ranks
        self.jobs: list[Job] = []

    def kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as it is now."""
        return whole_states.copied(state) if self.is_later else state

    def do(self, job: Job) -> None:
        """Write something. Collective, if that is now."""
        if self.is_later:
            self.jobs.append(job)
        else:
            with alike(self.doing):
                job()
