"""Weights and optimizers as one process has them, whatever the layout, and files of them.

What is asked for with ``state_dict`` and the like has whole tensors under plain names, and what is loaded may come from
plain Accelerate. The parts are collected on global rank 0, which writes (with ``save_on_each_node`` the first rank of
each node does); the others wait, and fail if it fails. Everything is written beside its place and moved there when it
is complete (:mod:`smp_strategy.integrations.accelerate.state_folders`). How a run goes on:
:mod:`smp_strategy.integrations.accelerate.save_state`.

All ranks must make these calls together, and are told so if they do not (:mod:`smp_strategy.distributed.rendezvous`).

Saves that go on in the background: what has gone wrong is said at the next call, and the end waits for them.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from accelerate.utils import save
from torch import Tensor, nn

from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.checkpoint.storage.write_errors import saving
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rendezvous import alike, meet
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate import full_states as whole_states
from smp_strategy.integrations.accelerate import rng_files as random_states
from smp_strategy.integrations.accelerate import state_folders as folders
from smp_strategy.integrations.accelerate.model_calls import ModelCalls
from smp_strategy.integrations.accelerate.optimizer import unwrapped
from smp_strategy.integrations.accelerate.saving_calls import StateCalls
from smp_strategy.integrations.accelerate.session import HookBase, Session
from smp_strategy.integrations.accelerate.shared_states import on_every_rank, sent_to_writers

__all__ = ["BackgroundHooks", "OWN_FILE", "SavingHooks"]

OWN_FILE: Final = "smp_strategy.bin"

T = TypeVar("T")


class _ModulePath(NamedTuple):
    """Where a module is in what the engine runs."""

    engine: Engine
    root: nn.Module
    path: str


class SavingHooks(HookBase):
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
                collect=lambda: on_every_rank(self._smp_collected("model.state_dict")),
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
        """The whole state dict of ``model``, or of a part of it, on every rank. Collective.

        Args:
            model: prepared, or a module in one that is.
            unwrap: as in Accelerate.
        """
        place = self._smp_place(model)
        if place is not None:
            return on_every_rank(self._smp_collected("accelerator.get_state_dict", place.path))
        whole: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
        return whole

    def get_written_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The same where files are written; elsewhere empty, unless ``model`` is not spread. Collective."""
        place = self._smp_place(model)
        if place is not None:
            return self._smp_for_writers(self._smp_collected("accelerator.get_state_dict", place.path))
        whole: dict[str, Any] = super().get_state_dict(model, unwrap=False)
        return whole

    def _smp_collected(self, call: str, path: str = "") -> dict[str, Any]:
        """On global rank 0."""
        meet(call)
        with self._smp_aside():
            return whole_states.model_state(self.smp.engine, path)

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
        meet("accelerator.get_optimizer_state_dict")
        engine, (bare,) = self._smp_engine_of(optimizer), unwrapped([optimizer])
        return bare.state_dict() if engine is None else self._smp_for_writers(engine.saved.full_optimizer_state(bare))

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
            engine.saved.load_optimizer_state(bare, state)

    def get_own_state(self) -> dict[str, Any]:
        """What a file of ours has: where random streams are. Collective."""
        return self._smp_streams()[1]

    def _smp_streams(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """For each data rank what Accelerate's file has, and the content of ours. Collective."""
        states, others = random_states.gathered(self.smp, self.step)
        own = {
            "engine": self.smp.engine.saved.state_dict() if self.smp.has_engine else None,
            "loaders": random_states.of_loaders(self._dataloaders),
            "data_ranks": self.smp.data_ranks(),
            "random_states": others,
        }
        return states, own

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the random streams of another run; those of single ranks under the same layout only."""
        if self.smp.has_engine and state["engine"] is not None:
            self.smp.engine.saved.load_state(state["engine"])
        random_states.set_loaders(self._dataloaders, state["loaders"])
        if state["data_ranks"] == self.smp.data_ranks() and self.smp.rank in state["random_states"]:
            random_states.set_states(state["random_states"][self.smp.rank])

    # Accelerate's calls

    def wait_for_everyone(self) -> None:
        """Wait for all ranks, and notice if some are in a call like those here instead. Collective."""
        meet("accelerator.wait_for_everyone")
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
        meet("accelerator.save_model")
        target = Path(save_directory)
        with self._smp_begun(target) as staging:
            with alike(f"saving to {target}"):
                super().save_model(model, staging, max_shard_size, safe_serialization)
            self._smp_move_in(staging, target, replaces=folders.WEIGHTS)

    # Which module, which optimizer

    def _smp_place(self, module: nn.Module) -> _ModulePath | None:
        """Where ``module`` is in what the engine runs; ``None``: it is not in there, and whole on every rank."""
        if self._smp_calls is None:
            return None
        root = self._smp_calls.model
        path = whole_states.path_in(root, self.unwrap_model(module))
        return None if path is None else _ModulePath(self.smp.engine, root, path)

    def _smp_engine_of(self, optimizer: Any) -> Engine | None:
        """What runs the module that ``optimizer`` trains, if it is spread."""
        if self._smp_calls is None or not whole_states.is_trained_by(self._smp_calls.model, optimizer):
            return None
        return self.smp.engine

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
        return sent_to_writers(state, writes=self._smp_writes)

    def _smp_told(self, decide: Callable[[], T]) -> T:
        """What global rank 0 decides, or why it cannot. Collective."""
        box: tuple[Any, Exception | None] = (None, None)
        if self.is_main_process:
            try:
                box = decide(), None
            except Exception as error:
                box = None, error
        decision, problem = collectives.tell(box, 0, "a decision of rank 0")
        if problem is not None:
            raise problem
        made: T = decision
        return made

    @contextmanager
    def _smp_begun(self, target: Path) -> Iterator[Path]:
        """An empty folder for what will be in ``target``; it is deleted if something fails. Collective."""
        staging = self._smp_told(lambda: folders.begin(target))
        with alike(f"making {staging}"):
            if self.is_local_main_process:  # hooks may write on every node
                staging.mkdir(parents=True, exist_ok=True)
        try:
            with saving(target):
                yield staging
        except BaseException:
            if self.is_local_main_process:
                folders.remove(staging)
            raise

    def _smp_move_in(self, staging: Path, target: Path, *, replaces: str) -> None:
        """What is complete takes its place. Collective."""
        for turn in (self.is_main_process, self.is_local_main_process):
            with alike(f"moving files to {target}"):
                if turn and staging.exists():
                    folders.move_in(staging, target, replaces=replaces)


class BackgroundHooks(HookBase):
    """In front of the other hooks: what they end is needed until files are there."""

    def begin(self, session: Session, plugin: Any) -> None:
        """Nothing is being saved yet."""
        self._smp_background = BackgroundSave()
        super().begin(session, plugin)

    def smp_settle(self) -> None:
        """Wait until everything that is being saved is there, and fail on all ranks if it failed on one. Collective."""
        if self.smp.config.async_save:
            with alike("saving in the background"):
                self._smp_background.wait()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As always; a checkpoint that could not be saved meanwhile is an error here, in the next step."""
        self._smp_background.check()
        super().backward(loss, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Wait for what is being saved, then let go of everything that is prepared."""
        self._smp_background.wait()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Wait for what is being saved, then end. Collective."""
        self.smp_settle()
        super().end_training()

    def _smp_leave(self) -> None:
        try:
            self._smp_background.wait()
        except Exception as error:
            warnings.warn(f"A checkpoint was not saved: {error}", stacklevel=1)
        leave: Any = super()
        leave._smp_leave()
