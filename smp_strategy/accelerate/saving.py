"""Saving and loading: files of one process, whatever the layout.

A folder that ``accelerator.save_state`` writes has what Accelerate writes without us, file by file: whole tensors under
plain names. So plain Accelerate goes on with it, and we go on with one of plain Accelerate. One small file of ours is
added, :data:`OWN_FILE`: where the random streams of the engine are, and the generators of ranks that do not draw like
the others of their pipeline.

The parts are collected on global rank 0, which writes (with ``save_on_each_node`` the first rank of each node does);
the others wait, and fail if it fails. Everything is written beside its place and moved there when it is complete
(:mod:`smp_strategy.accelerate.folders`).

All ranks must make these calls together, and are told so if they do not (:mod:`smp_strategy.meeting`).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.utils import OPTIMIZER_NAME, load, save
from torch import nn

from smp_strategy.accelerate import folders, random_states, state_files, whole_states
from smp_strategy.accelerate.host import Host
from smp_strategy.accelerate.model import ModelCalls
from smp_strategy.accelerate.optimizer import unwrapped
from smp_strategy.accelerate.session import Session
from smp_strategy.accelerate.state_calls import StateCalls
from smp_strategy.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.meeting import alike, meet

__all__ = ["OWN_FILE", "SavingHooks"]

OWN_FILE: Final = "smp_strategy.bin"

T = TypeVar("T")

logger = get_logger(__name__)


class _Place(NamedTuple):
    """Where a module is in what the engine runs."""

    engine: Engine
    root: nn.Module
    path: str


class SavingHooks(Host):
    """See the module docstring."""

    _smp_calls: ModelCalls | None

    def begin(self, session: Session, plugin: Any) -> None:
        """Nothing is prepared yet."""
        super().begin(session, plugin)
        self._smp_state_calls: list[StateCalls] = []

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Let ``state_dict`` and ``load_state_dict`` of ``model`` be about the whole."""
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if is_new:
            calls = StateCalls(
                model,
                is_spread=lambda: self._smp_place(model) is not None and self.smp.engine.is_spread,
                collect=lambda: self._smp_collected("model.state_dict"),
                load=partial(self.load_model_state_dict, model),
            )
            self._smp_state_calls.append(calls)
        return model

    def free_memory(self, *objects: Any) -> Any:
        """Let go of everything that is prepared."""
        for calls in self._smp_state_calls:
            calls.remove()
        self._smp_state_calls = []
        return super().free_memory(*objects)

    # What other code, a trainer that writes files of its own, may ask for as well

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of ``model``, or of a part of it, where files are written; empty elsewhere. Collective.

        A model that is not spread over ranks, because it was not prepared for training, has it everywhere.

        Args:
            model: prepared, or a module in one that is.
            unwrap: as in Accelerate.
        """
        place = self._smp_place(model)
        if place is not None:
            return self._smp_collected("accelerator.get_state_dict", place.path)
        whole: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
        return whole

    def _smp_collected(self, call: str, path: str = "") -> dict[str, Any]:
        meet(call, self.smp.stage_ranks)
        with self._smp_aside():
            return self._smp_for_writers(whole_states.model_state(self.smp.engine, path))

    @contextmanager
    def _smp_aside(self) -> Iterator[None]:
        with ExitStack() as stack:
            for calls in self._smp_state_calls:
                stack.enter_context(calls.aside())
            yield

    def get_optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """``optimizer.state_dict()`` as one process has it, where files are written; empty elsewhere. Collective.

        Args:
            optimizer: prepared.
        """
        meet("accelerator.get_optimizer_state_dict", self.smp.stage_ranks)
        engine, (bare,) = self._smp_engine_of(optimizer), unwrapped([optimizer])
        return bare.state_dict() if engine is None else self._smp_for_writers(engine.full_optimizer_state(bare))

    def load_model_state_dict(
        self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load a whole state dict, of which each rank takes its share. All ranks have to do it.

        Args:
            model: prepared.
            state: as one process has it, on every rank.
            strict: whether names must fit.

        Returns:
            Names that the state lacks, and names that the model lacks.
        """
        place = self._smp_place(model)
        if place is not None and place.path:
            raise ConfigError(
                f"`{place.path}` is a part of the model that was prepared, and is loaded together with all of it. Give "
                "that model and its state dict."
            )
        engine = None if place is None else place.engine
        with self._smp_aside():
            return whole_states.load_model(engine, self.unwrap_model(model), state, strict=strict)

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load the whole state of an optimizer, of which each rank takes its share. All ranks have to do it.

        Args:
            optimizer: prepared.
            state: as one process has it, on every rank.
        """
        engine, (bare,) = self._smp_engine_of(optimizer), unwrapped([optimizer])
        if engine is None:
            bare.load_state_dict(state)
        else:
            engine.load_optimizer_state(bare, state)

    def get_own_state(self) -> dict[str, Any]:
        """What a file of ours has: where random streams are. Collective."""
        return self._smp_streams()[1]

    def _smp_streams(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """For each data rank what Accelerate's file has, and the content of ours. Collective."""
        states, others = random_states.gathered(self.smp, self.step)
        own = {
            "engine": self.smp.engine.state_dict() if self.smp.has_engine else None,
            "loaders": random_states.of_loaders(self._dataloaders),
            "data_ranks": self.smp.data_ranks(),
            "random_states": others,
        }
        return states, own

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the random streams of another run; those of single ranks under the same layout only."""
        if self.smp.has_engine and state["engine"] is not None:
            self.smp.engine.load_state(state["engine"])
        random_states.set_loaders(self._dataloaders, state["loaders"])
        if state["data_ranks"] == self.smp.data_ranks() and self.smp.rank in state["random_states"]:
            random_states.set_states(state["random_states"][self.smp.rank])

    # Accelerate's calls

    def wait_for_everyone(self) -> None:
        """Wait for all ranks, and notice if some are in a call like those here instead. Collective."""
        meet("accelerator.wait_for_everyone", self.smp.stage_ranks)
        super().wait_for_everyone()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write weights that ``load_checkpoint_in_model`` and plain PyTorch can read. Collective.

        Args:
            model: prepared, or a module in one that is.
            save_directory: made if it is not there.
            max_shard_size: of a file.
            safe_serialization: whether to write safetensors.
        """
        meet("accelerator.save_model", self.smp.stage_ranks)
        target = Path(save_directory)
        with (
            self._smp_written(target, replaces=folders.WEIGHTS) as staging,
            alike(f"saving to {target}", self.smp.stage_ranks),
        ):
            super().save_model(model, staging, max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Path:
        """Write what a run needs to go on. Collective.

        Args:
            output_dir: the folder; with ``automatic_checkpoint_naming`` Accelerate's next one.
            safe_serialization: whether to write weights as safetensors.
            options: none; they are for plugins of others.

        Returns:
            The folder.
        """
        meet("accelerator.save_state", self.smp.stage_ranks)
        if options:
            raise ConfigError(f"`save_state` has no options {sorted(options)} with SMPPlugin. Leave them out.")
        target = self._smp_told(lambda: self._smp_folder_to_write(output_dir))
        logger.info(f"Saving current state to {target}")
        with self._smp_written(target, replaces=folders.STATES) as staging:
            for number, optimizer in enumerate(self._optimizers):
                state = self.get_optimizer_state_dict(optimizer)
                with alike(f"saving to {target}", self.smp.stage_ranks):
                    self._smp_save(state, staging / state_files.name(f"{OPTIMIZER_NAME}.bin", number))
                del state  # before the next is collected
            weights = [self.get_state_dict(model, unwrap=False) for model in self._models]
            with self._smp_known(weights), alike("running hooks of save_state", self.smp.stage_ranks):
                for hook in self._save_model_state_pre_hook.values():
                    hook(self._models, weights, str(staging))
            self._smp_save_rest(staging, weights, safe_serialization=safe_serialization)
        self._smp_delete_oldest(target)
        self.project_configuration.iteration += 1
        return target

    def _smp_save_rest(self, staging: Path, weights: list[dict[str, Any]], *, safe_serialization: bool) -> None:
        """All but the optimizers. Collective."""
        custom = [self._smp_state_of(each) for each in self._custom_objects]
        states, own = self._smp_streams()
        with alike(f"saving to {staging}", self.smp.stage_ranks):
            if self._smp_writes:
                state_files.write(self, staging, weights, custom, safe_serialization=safe_serialization)
            for rank, state in enumerate(states):
                self._smp_save(state, staging / random_states.FILE.format(rank))
            self._smp_save(own, staging / OWN_FILE)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Go on from what :meth:`save_state` has written, or plain Accelerate, under this or another layout.

        Collective.

        Args:
            input_dir: the folder; ``None``: the newest one, with ``automatic_checkpoint_naming``.
            load_kwargs: of ``torch.load``, for optimizers, schedulers and data loaders.
            options: ``strict``, for the names of weights; ``map_location``, which makes no difference here.
        """
        meet("accelerator.load_state", self.smp.stage_ranks)
        unknown = sorted(options.keys() - {"strict", "map_location"})
        if unknown:
            raise ConfigError(f"`load_state` has no options {unknown} with SMPPlugin. Leave them out.")
        folder = self._smp_told(lambda: self._smp_folder_to_read(input_dir))
        logger.info(f"Loading states from {folder}")
        with alike(f"loading from {folder}", self.smp.stage_ranks):
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} exists on rank 0, but not on rank {self.smp.rank}. Use a folder that all nodes share, "
                    "or save with `ProjectConfiguration(save_on_each_node=True)`."
                )
            models = list(self._models)
            for hook in self._load_model_state_pre_hook.values():
                hook(models, str(folder))
            self._smp_load(folder, models, load_kwargs or {}, strict=options.get("strict", True))

    def _smp_load(self, folder: Path, models: list[nn.Module], load_kwargs: dict[str, Any], *, strict: bool) -> None:
        """This rank's share of what is in ``folder``; hooks may have loaded some models."""
        for number, model in enumerate(models):
            self.load_model_state_dict(model, state_files.weights(folder, number), strict=strict)
        for number, optimizer in enumerate(self._optimizers):
            path = folder / state_files.name(f"{OPTIMIZER_NAME}.bin", number)
            self.load_optimizer_state_dict(optimizer, state_files.mapped(path, **load_kwargs))
            whole_states.leave_file(optimizer)
        state_files.read(self, folder, self.smp.data_rank, load_kwargs)
        for number, each in enumerate(self._custom_objects):
            state_files.read_custom(folder, number, partial(self._smp_load_into, each))
        step = random_states.step_in(folder)
        if step is not None:
            self.step = step
        if (folder / OWN_FILE).exists():
            self.load_own_state(load(folder / OWN_FILE))

    # Which module, which optimizer

    def _smp_place(self, module: nn.Module) -> _Place | None:
        """Where ``module`` is in what the engine runs; ``None``: it is not in there, and whole on every rank."""
        if self._smp_calls is None:
            return None
        root = self._smp_calls.model
        path = whole_states.path_in(root, self.unwrap_model(module))
        return None if path is None else _Place(self.smp.engine, root, path)

    def _smp_engine_of(self, optimizer: Any) -> Engine | None:
        """What runs the module that ``optimizer`` trains, if it is spread."""
        if self._smp_calls is None or not whole_states.is_trained_by(self._smp_calls.model, optimizer):
            return None
        return self.smp.engine

    def _smp_state_of(self, custom: Any) -> Any:
        """That of an object which was registered for checkpointing. Collective if it is one that is spread."""
        if isinstance(custom, nn.Module):
            return self.get_state_dict(custom) if self._smp_place(custom) is not None else custom.state_dict()
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

    # Who writes, and where

    @property
    def _smp_writes(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each_node else self.is_main_process)

    def _smp_save(self, state: Any, path: Path) -> None:
        save(state, path, save_on_each_node=self.project_configuration.save_on_each_node)

    def _smp_for_writers(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state``, which global rank 0 has, on all ranks that write. Collective."""
        if not self.project_configuration.save_on_each_node:
            return state
        return state_files.sent_to_writers(state, writes=self._smp_writes)

    def _smp_told(self, decide: Callable[[], T]) -> T:
        """What global rank 0 decides, or why it cannot. Collective."""
        box: list[Any] = [None, None]
        if self.is_main_process:
            try:
                box[0] = decide()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        decision: T = box[0]
        return decision

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
            if not folder.is_dir():
                raise ValueError(f"Tried to find {folder} but folder does not exist")
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        return folders.newest(Path(self.project_dir) / "checkpoints")

    @contextmanager
    def _smp_written(self, target: Path, *, replaces: str) -> Iterator[Path]:
        """A folder whose content goes to ``target`` at the end, unless something fails. Collective."""
        staging = self._smp_told(lambda: folders.begin(target))
        with alike(f"making {staging}", self.smp.stage_ranks):
            if self.is_local_main_process:  # hooks may write on every node
                staging.mkdir(parents=True, exist_ok=True)
        try:
            yield staging
        except BaseException:
            if self.is_local_main_process:
                folders.remove(staging)
            raise
        for turn in (self.is_main_process, self.is_local_main_process):
            with alike(f"moving files to {target}", self.smp.stage_ranks):
                if turn and staging.exists():
                    folders.move_in(staging, target, replaces=replaces)

    def _smp_delete_oldest(self, target: Path) -> None:
        """Keep as many checkpoints as the user wants. Collective."""
        naming = self.project_configuration
        with alike("deleting old checkpoints", self.smp.stage_ranks):
            if naming.automatic_checkpoint_naming and naming.total_limit is not None and self._smp_writes:
                for old in folders.delete_oldest(target.parent, naming.total_limit):
                    logger.warning(f"Deleted {old} to make room for the new checkpoint.")
