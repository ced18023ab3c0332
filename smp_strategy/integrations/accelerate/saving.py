"""Full state dicts of models and optimizers under any layout, and files of them (``save_model``).

State dicts have whole tensors under plain names, and loading accepts those of plain Accelerate. Files are written from
the shards, one tensor at a time. Only if they are written later, by hooks or on each node are the shards gathered on
global rank 0 (with ``save_on_each_node`` on the first rank of each node); the other ranks wait, and fail if it fails.
Files are written beside their place and moved there when they are complete
(:mod:`smp_strategy.engine.saving.saved_models.state_folders`). Resuming a run:
:mod:`smp_strategy.integrations.accelerate.save_state`.

All calls are collective; a rank that does not make the same call gets an error
(:mod:`smp_strategy.engine.lifecycle.main_process_calls`).
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelerate.utils import save
from torch import Tensor, nn

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.checkpointing import own_state_dict
from smp_strategy.engine.saving.resumable_loader import generator_states, set_generators
from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.engine.saving.saved_models.pretrained_calls import (
    PretrainedCalls,
    StateDictCalls,
    library_of,
    pretrained_parts,
)
from smp_strategy.engine.saving.saved_models.shared_states import on_every_rank, sent_to_writers, storage_of
from smp_strategy.engine.saving.saved_models.spread_saving import (
    FileNotes,
    SpreadModel,
    spread_model,
    write_together,
)
from smp_strategy.engine.updates.optimizer_steps import trains
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate import rng_files
from smp_strategy.integrations.accelerate.optimizer import unwrapped
from smp_strategy.integrations.accelerate.session import HookBase, Session
from smp_strategy.model.patching import Patches

__all__ = ["OWN_FILE", "SavingHooks"]

OWN_FILE: Final = "smp_strategy.bin"
_READ: Final = "reading parameters"


class _ModulePath(NamedTuple):
    """Path of a module within the module that the engine runs."""

    engine: Engine
    path: str


class SavingHooks(HookBase):
    """Methods of the Accelerator for full state dicts and model files."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Make ``state_dict`` and ``load_state_dict`` of ``model`` handle full state dicts."""
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if is_new:
            calls = StateDictCalls(
                model,
                is_partitioned=lambda: self._smp_place(model) is not None and self.smp.engine.is_spread,
                collect=partial(self._smp_everywhere, "model.state_dict", ""),
                load=partial(self.load_model_state_dict, model),
            )
            self.smp.state_calls.append(calls)
            for _, part in pretrained_parts(self.unwrap_model(model)):
                if library_of(part) is not None:  # others ask for `state_dict`
                    ways = partial(self._smp_spread, part), partial(self._smp_whole_sizes, part)
                    together = partial(self._smp_with_others, part)
                    self.smp.pretrained_calls.append(PretrainedCalls(part, *ways, together=together))
        return model

    def free_memory(self, *objects: Any) -> Any:
        """Release everything that is prepared."""
        for pretrained in self.smp.pretrained_calls:
            pretrained.remove()
        for calls in self.smp.state_calls:
            calls.remove()
        self.smp.state_calls, self.smp.pretrained_calls = [], []
        return super().free_memory(*objects)

    # What the main process calls alone: other ranks take part, see `main_process_calls`

    def begin(self, session: Session, plugin: Any) -> None:
        """Let this rank take part in calls of the main process."""
        super().begin(session, plugin)
        session.main_calls.take_part, session.read_weights = self._smp_take_part, self._smp_read

    def _smp_take_part(self, call: tuple[Any, ...]) -> None:
        """Make a call of the main process with it. Collective."""
        name, path, *arguments = call
        if name == "optimizer.state_dict":
            self._optimizers[path].state_dict()
            return
        if name in ("accelerator.get_state_dict", "model.state_dict", _READ):
            self._smp_everywhere(name, path)
            return
        assert self.smp.calls is not None
        part = self.smp.calls.model.get_submodule(path)
        if name == "accelerator.save_model":
            self.save_model(part, *arguments)
        else:
            calls = next(each for each in self.smp.pretrained_calls if each.model is part)
            calls.take_part(name, *arguments)

    def _smp_with_others(self, part: nn.Module, name: str, *arguments: Any) -> AbstractContextManager[None]:
        """Context of a call ``name`` about ``part`` of the model, which other ranks can make by plain ``arguments``."""
        place = self._smp_place(part)
        calls = self.smp.main_calls
        return calls.together() if place is None else calls.together((name, place.path, *arguments))

    # State dicts, also for other code, such as a trainer that writes files of its own

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of ``model``, or of a submodule, on every rank. Collective.

        Args:
            model: prepared, or a module in one that is.
            unwrap: as in Accelerate.
        """
        place = self._smp_place(model)
        if place is not None:
            return self._smp_everywhere("accelerator.get_state_dict", place.path)
        whole: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
        return whole

    def get_written_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Like :meth:`get_state_dict`, but only on ranks that write files; empty elsewhere, unless ``model`` is whole.

        Collective.
        """
        place = self._smp_place(model)
        if place is not None:
            with self.smp.main_calls.together(meeting="accelerator.get_state_dict"):
                return self._smp_for_writers(self._smp_collected(place.path))
        whole: dict[str, Any] = super().get_state_dict(model, unwrap=False)
        return whole

    def _smp_read(self) -> Mapping[str, Any] | None:
        """Gather the full state dict on every rank, for code that reads parameters; ``None``: not all ranks come."""
        with self.smp.main_calls.asked((_READ, "")) as all_come:
            return self._smp_everywhere(_READ, "") if all_come else None

    def _smp_everywhere(self, call: str, path: str) -> dict[str, Any]:
        """Gather the full state dict on every rank. Collective."""
        with self.smp.main_calls.together((call, path), call):
            return on_every_rank(self._smp_collected(path))

    def _smp_collected(self, path: str) -> dict[str, Any]:
        """Gather the full state dict on global rank 0. Collective."""
        return SpreadModel(self.smp.engine, path, self._smp_aside).gathered_on_first()

    @contextmanager
    def _smp_aside(self) -> Iterator[None]:
        with ExitStack() as stack:
            for calls in self.smp.state_calls:
                stack.enter_context(calls.aside())
            yield

    def get_optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Return the full state dict of an optimizer on ranks that write files; empty elsewhere. Collective."""
        engine, (bare,) = self._smp_engine_of(optimizer), unwrapped([optimizer])
        with self.smp.main_calls.together(meeting="accelerator.get_optimizer_state_dict"):
            if engine is None:
                return bare.state_dict()
            return self._smp_for_writers(engine.saved.full_optimizer_state(bare))

    def write_optimizer_state_dict(self, optimizer: Any, path: Path) -> None:
        """Write the full state dict of an optimizer to a file, atomically; no rank ever has all of it. Collective."""
        engine, (bare,) = self._smp_engine_of(optimizer), unwrapped([optimizer])
        with self.smp.main_calls.together(meeting="accelerator.write_optimizer_state_dict"):
            if engine is not None:
                engine.saved.write_full_optimizer_state(bare, path)
            elif self.is_main_process:
                folders.save_file(bare.state_dict(), path)

    def load_model_state_dict(
        self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load a full state dict, the same on every rank, which takes its shard. Collective.

        Returns:
            Names that are missing in the state, and names that are missing in the model.
        """
        place = self._smp_place(model)
        if place is not None and place.path:
            raise ConfigError(
                f"`{place.path}` is a part of the model that was prepared, and is loaded together with all of it. Give "
                "that model and its state dict."
            )
        engine = None if place is None else place.engine
        with self._smp_aside():
            return _load_model(engine, self.unwrap_model(model), state, strict=strict)

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load the full state of an optimizer, the same on every rank, which takes its shard. Collective."""
        engine, (bare,) = self._smp_engine_of(optimizer), unwrapped([optimizer])
        if engine is None:
            bare.load_state_dict(state)
        else:
            engine.saved.load_optimizer_state(bare, state)

    def get_own_state(self) -> dict[str, Any]:
        """Return the content of our own file: the states of random streams. Collective."""
        return self._smp_streams()[1]

    def _smp_streams(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return Accelerate's random states of each data rank, and the content of our own file. Collective."""
        states, others = rng_files.gathered(self.smp, self.step)
        own = {
            "engine": self.smp.engine.saved.state_dict() if self.smp.has_engine else None,
            "loaders": [generator_states(getattr(each, "base_dataloader", each)) for each in self._dataloaders],
            "data_ranks": self.smp.data_ranks(),
            "random_states": others,
        }
        return states, own

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the random streams of another run; those of single ranks only under the same layout."""
        if self.smp.has_engine and state["engine"] is not None:
            self.smp.engine.saved.load_state(state["engine"])
        for loader, states in zip(self._dataloaders, state["loaders"], strict=False):
            set_generators(getattr(loader, "base_dataloader", loader), states)
        if state["data_ranks"] == self.smp.data_ranks() and self.smp.rank in state["random_states"]:
            rng_files.set_states(state["random_states"][self.smp.rank])

    # Accelerate's calls

    def wait_for_everyone(self) -> None:
        """Barrier over all ranks; raises if some are in another call instead. Collective."""
        with self.smp.main_calls.together(meeting="accelerator.wait_for_everyone"):
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
            save_directory: created if missing.
            max_shard_size: maximum size of a file.
            safe_serialization: whether to write safetensors.
        """
        arguments = os.fspath(save_directory), max_shard_size, safe_serialization
        with self._smp_with_others(model, "accelerator.save_model", *arguments):
            self._smp_save_model(
                super().save_model, model, folders.to_write(save_directory), max_shard_size, safe_serialization
            )

    def _smp_save_model(
        self,
        save_model: Callable[..., None],
        model: nn.Module,
        target: Path,
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None:
        """Save by Accelerate's ``save_model``. Collective."""
        spread = self._smp_spread(model)
        if spread is not None and safe_serialization and not self.project_configuration.save_on_each_node:
            plan = partial(self._smp_noted, save_model, model, max_shard_size)
            write_together("accelerator.save_model", spread, target, plan, replaces=folders.WEIGHTS)
            return
        with self.smp.main_calls.together(meeting="accelerator.save_model"), self._smp_begun(target) as staging:
            with folders.writing(target):
                save_model(model, staging, max_shard_size, safe_serialization)
            self._smp_move_in(staging, target, replaces=folders.WEIGHTS)

    def _smp_noted(
        self,
        save_model: Callable[..., None],
        model: nn.Module,
        max_shard_size: int | str,
        staging: Path,
        entries: dict[str, Any],
    ) -> FileNotes:
        """Let Accelerate's ``save_model`` prepare the files; those of tensors are noted."""
        notes = FileNotes(staging)
        with Patches() as patches:
            patches.put(self, "get_state_dict", lambda *_, **__: entries)
            patches.put(self, "save", lambda shard, path, **_: notes.note(shard, path, {"format": "pt"}))
            save_model(model, staging, max_shard_size)
        return notes

    # Which module, which optimizer

    def _smp_spread(self, model: nn.Module) -> SpreadModel | None:
        """``model``, if this rank lacks a part of it; else ``None``."""
        place = self._smp_place(model)
        if place is None:
            return None
        return spread_model(place.engine, place.path, self._smp_aside)

    def _smp_whole_sizes(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which parameters of ``model`` have the sizes of the whole model."""
        place = self._smp_place(model)
        return nullcontext() if place is None else place.engine.saved.looking_as_built()

    def _smp_place(self, module: nn.Module) -> _ModulePath | None:
        """Locate ``module`` in the module that the engine runs; ``None``: not in there, and whole on every rank."""
        if self.smp.calls is None:
            return None
        wanted, named = self.unwrap_model(module), self.smp.calls.model.named_modules(remove_duplicate=False)
        path = next((name for name, each in named if each is wanted), None)
        return None if path is None else _ModulePath(self.smp.engine, path)

    def _smp_engine_of(self, optimizer: Any) -> Engine | None:
        """Return the engine of the module that ``optimizer`` trains; ``None`` if that module is whole."""
        if self.smp.calls is None or not trains(optimizer, self.smp.calls.model):
            return None
        return self.smp.engine

    # Writing processes and folders

    @property
    def _smp_writes(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each_node else self.is_main_process)

    def _smp_save(self, state: Any, path: Path) -> None:
        save(state, path, save_on_each_node=self.project_configuration.save_on_each_node)

    def _smp_for_writers(self, state: dict[str, Any]) -> dict[str, Any]:
        """Send ``state`` from global rank 0 to all ranks that write. Collective."""
        if not self.project_configuration.save_on_each_node:
            return state
        return sent_to_writers(state, writes=self._smp_writes)

    @contextmanager
    def _smp_begun(self, target: Path) -> Iterator[Path]:
        """Yield an empty staging folder for ``target``; it is deleted on failure. Collective."""
        staging = self.smp.main_calls.decided(lambda: folders.begin(target))
        with self.smp.main_calls.together(doing=f"making {staging}"):
            if self.is_local_main_process:  # hooks may write on every node
                staging.mkdir(parents=True, exist_ok=True)
        with folders.filling(staging, target, is_mine=self.is_local_main_process):
            yield staging

    def _smp_move_in(self, staging: Path, target: Path, *, replaces: str) -> None:
        """Move the complete staging folder to its place. Collective."""
        for turn in (self.is_main_process, self.is_local_main_process):
            with self.smp.main_calls.together(doing=f"moving files to {target}"):
                if turn and staging.exists():
                    folders.move_in(staging, target, replaces=replaces)


def _load_model(
    engine: Engine | None, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a full state dict, which may list tied tensors under one name; no ``engine``: this rank has all.

    Returns:
        Names that are missing in ``state``, and unexpected ones.
    """
    own = own_state_dict(module)
    state = _with_all_names(own, state)
    if engine is None:
        module.load_state_dict(state, strict=strict)
    else:
        engine.saved.load_state_dict(state, strict)
    return sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())


def _with_all_names(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Add the missing names of tied tensors to ``state``: safetensors files keep only one of them."""
    full = OrderedDict(state)
    if hasattr(state, "_metadata"):
        full._metadata = state._metadata  # type: ignore[attr-defined]
    names: dict[Any, list[str]] = {}
    for name, tensor in own.items():
        if isinstance(tensor, Tensor):
            names.setdefault(storage_of(tensor), []).append(name)
    for group in names.values():
        for there in [name for name in group if name in full][:1]:
            for name in group:
                full.setdefault(name, full[there])
    return full
