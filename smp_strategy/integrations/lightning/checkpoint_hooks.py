"""Saving and loading of Lightning checkpoints, full or sharded; every layout reads both forms.

Lightning's calls, on all ranks::

    Trainer.save_checkpoint   lightning_module_state_dict, optimizer_state per optimizer, hooks of callbacks and module
                              save_checkpoint, barrier
    ModelCheckpoint           that, then remove_checkpoint for what is not kept, and a link for `save_last="link"`
    ckpt_path=...             load_checkpoint, hooks of the module, load_model_state_dict, hooks of callbacks
                              load_optimizer_state_dict (fit only), hooks of loops and schedulers

*Full*: global rank 0 collects all tensors and writes one ordinary file; other ranks see their names, shapes and dtypes.
Where no hook looks at them, it collects one tensor at a time (:mod:`.streamed_checkpoint`).
*Sharded*: tensors stay on their ranks; hooks see each rank's blocks, and all ranks write a directory.
"""

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.rank_group import RankGroup
from smp_strategy.engine.run_outcome import have_all_stopped
from smp_strategy.engine.saving.async_saves import AsyncSaves
from smp_strategy.engine.saving.checkpoint_content import (
    described_elsewhere,
    is_path,
    named_in,
    read_checkpoint,
    recover_folder,
    split_checkpoint,
    with_all_names,
)
from smp_strategy.engine.saving.checkpoint_objects import has_objects, put_whole_objects
from smp_strategy.engine.saving.saved_models.pretrained_calls import PretrainedCalls, pretrained_parts
from smp_strategy.engine.saving.saved_models.shared_states import snapshot
from smp_strategy.engine.saving.saved_models.spread_saving import spread_model
from smp_strategy.errors import CheckpointError, PeerFailedError, UnsupportedError
from smp_strategy.integrations.lightning.resume import ResumeHooks
from smp_strategy.integrations.lightning.streamed_checkpoint import StreamedSaves
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.model.patching import Patches

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy

__all__ = ["CheckpointHooks", "unwrap"]

# Parameter names for the optimizer state in a full file, for the `smp` commands; Lightning ignores the entry.
PARAMETER_NAMES: Final = "smp_strategy/parameter_names"


@final
class CheckpointHooks:
    """Saving and loading of one strategy, in both forms.

    Users may replace ``strategy.config`` between calls, so options and engine are asked for.

    Attributes:
        looking_plain: context in which parts of the module have no patches of this package.
    """

    def __init__(
        self,
        strategy: "ParallelStrategy",
        config: Callable[[], SMPConfig],
        tree: Tree,
        engine: Callable[[], Engine],
        resume: ResumeHooks,
    ) -> None:
        self._strategy = strategy
        self._config = config
        self._tree = tree
        self._engine = engine
        self._resume = resume
        self._saves: AsyncSaves | None = None
        self._pretrained: list[PretrainedCalls] = []
        self._streamed = StreamedSaves(strategy, tree, engine, self._is_written_here)
        self.looking_plain: Callable[[], AbstractContextManager[None]] = nullcontext
        # An error has come out of a step: ranks may be in different places of it.
        self._is_torn = False
        # Result of the vote on saving after an error; None: no vote yet.
        self._stopped_together: bool | None = None

    @property
    def _is_sharded(self) -> bool:
        return self._config().state_dict_type == "sharded"

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights under their plain names; see the module docstring for the two forms. Collective."""
        self._refuse_alone()
        RankGroup().wait("`trainer.save_checkpoint`")
        if self._is_sharded:
            return with_all_names(self._engine().saved.held_state(())["state_dict"])
        return described_elsewhere(self._streamed.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state: all of it (full), or this rank's blocks (sharded). Collective."""
        if self._is_sharded:
            state: dict[str, Any] = self._engine().saved.held_state((unwrap(optimizer),))["optimizer_0"]
            return state
        return described_elsewhere(self._streamed.optimizer_state(unwrap(optimizer)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, or begin to; the Trainer waits for all ranks afterwards. Collective."""
        module, optimizers = self._strategy.lightning_module, list(map(unwrap, self._strategy.optimizers))
        assert module is not None
        objects = checkpoint, self._engine().saved, module, optimizers, self.looking_plain
        if self._streamed.is_on and has_objects(*objects):
            self._streamed.give_up()
            checkpoint["state_dict"] = self.lightning_module_state_dict()
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"] = list(map(self.optimizer_state, optimizers))
        self._resume.add_state(checkpoint, self._streamed.gradients)
        if not self._streamed.is_on:
            put_whole_objects(*objects)
        if not self._is_sharded and "optimizer_states" in checkpoint:
            checkpoint[PARAMETER_NAMES] = self._parameter_names()
        saves = self._saves
        assert saves is not None
        saves.wait()
        place = self._strategy.broadcast(filepath)
        if self._is_sharded:
            self._refuse_plugins(filepath, storage_options)
            self._save_sharded(checkpoint, place, saves)
        elif self._streamed.is_on:
            self._streamed.write(checkpoint, place)
        elif self._strategy.global_rank == 0:
            self._save_full(checkpoint, filepath, place, storage_options, saves)

    def _parameter_names(self) -> list[list[list[str]]]:
        """Parameter names per optimizer and parameter group, in the order of PyTorch's parameter numbers."""
        module = self._strategy.lightning_module
        assert module is not None
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [unwrap(optimizer).param_groups for optimizer in self._strategy.optimizers]
        return [[[names.get(each, "") for each in group["params"]] for group in of_one] for of_one in groups]

    def _save_sharded(self, checkpoint: dict[str, Any], path: Any, saves: AsyncSaves) -> None:
        state, rest = split_checkpoint(checkpoint)
        if saves.in_background and self._strategy.global_rank == 0:
            rest = snapshot(rest)
        saves.save_sharded(self._engine().saved, path, state, rest=rest, note=self._note(checkpoint))

    def _save_full(self, checkpoint: dict[str, Any], given: Any, place: Any, options: Any, saves: AsyncSaves) -> None:
        if saves.in_background:
            # Spread weights were collected into new tensors, which need no further copy.
            fresh = (
                {id(leaf) for leaf in pytree.tree_leaves(checkpoint["state_dict"])} if self._engine().is_spread else ()
            )
            checkpoint = snapshot(checkpoint, lambda tensor: id(tensor) in fresh)
        if self._is_plain_file(place, options):
            saves.save_full(place, checkpoint)
        else:
            io = self._strategy.checkpoint_io
            saves.save(place, lambda: io.save_checkpoint(checkpoint, given, storage_options=options))

    def _note(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        counts = {key: int(checkpoint[key]) for key in ("global_step", "epoch") if key in checkpoint}
        return {"layout": self._engine().mesh.shape.degrees, **counts}

    def remove_checkpoint(self, filepath: Any, plain: Callable[[Any], None]) -> None:
        """Remove a checkpoint of either form, on global rank 0, once the newer one in flight is complete."""
        if self._strategy.global_rank != 0:
            return
        io = self._strategy.checkpoint_io
        if self._saves is None:
            plain(filepath)
        elif self._has_own_io:
            self._saves.remove(filepath, lambda: io.remove_checkpoint(filepath))
        else:
            self._saves.remove(filepath)

    def _refuse_plugins(self, path: Any, storage_options: Any = None) -> None:
        """Refuse plugins and options that the ranks do not use, which write a folder together."""
        if self._has_own_io or storage_options is not None:
            raise UnsupportedError(
                f"{path} cannot be written with `state_dict_type='sharded'`: all ranks write to a folder or an address "
                "that all of them see, past plugins (`CheckpointIO`) and without `storage_options`. Use "
                '`state_dict_type="full"`, or leave these out: fsspec takes options of a storage from its variables '
                "and configuration files."
            )

    def _refuse_alone(self) -> None:
        """Refuse a checkpoint after an error unless all ranks have stopped between the same steps.

        A refused checkpoint is warned of, and the error is raised as if no callback had asked for one.
        """
        error, trainer = sys.exception(), getattr(self._strategy.lightning_module, "_trainer", None)
        if error is None or trainer is None or trainer.state.status != "interrupted":
            return
        if self._stopped_together is None:
            place = f"{trainer.global_step}/{trainer.current_epoch}/{type(error).__name__}"
            is_in_midst = self._is_torn or isinstance(error, PeerFailedError)
            self._stopped_together = have_all_stopped(None if is_in_midst else place)
        if self._stopped_together:
            assert self._saves is not None
            self._saves.in_background = False  # this process may end soon
            return
        warnings.warn(
            f"No checkpoint is saved of the {type(error).__name__} that ends this run: that takes all ranks, but they "
            "have not all stopped between the same steps. Save at intervals (`every_n_train_steps`).",
            stacklevel=2,
        )
        self._strategy.on_exception(error)
        trainer._teardown()
        raise error

    # Loading

    def recover_checkpoints(self, trainer: Any) -> None:
        """Prepare folders and callbacks before anybody looks for the last checkpoint.

        Checkpoints are put back that an interrupted save has moved aside. At an address, the callback would find names
        without the protocol, which are none of a checkpoint, and the run would begin anew.
        """
        folders = {trainer.default_root_dir}
        for callback in trainer.checkpoint_callbacks:
            if (resolve := getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)) is not None:
                folders.add(folder := resolve(trainer))
                vars(callback).pop("_find_last_checkpoints", None)
                if not is_path(folder):
                    callback._find_last_checkpoints = partial(_last_checkpoints, folder, callback)
        for folder in folders:
            recover_folder(folder)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None, plain: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """Read a checkpoint; see :func:`~smp_strategy.engine.saving.checkpoint_content.read_checkpoint`.

        Without ``weights_only`` the option ``checkpoint_weights_only`` decides; ``plain`` is Lightning's own method.
        """
        if self._saves is not None:
            self._saves.wait()
        if weights_only is None:
            weights_only = self._config().checkpoint_weights_only and not _is_forced_open()
        path, verifies = self._strategy.broadcast(checkpoint_path), self._strategy.local_rank == 0
        is_ours = not self._has_own_io
        return read_checkpoint(path, plain, weights_only=weights_only, is_ours=is_ours, verifies=verifies)

    def load_model_state_dict(self, engine: Engine | None, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of the weights; before the first step that is all of them.

        ``engine`` is that of the latest run, which may have trained another module.
        """
        module = self._strategy.lightning_module
        assert module is not None
        if engine is not None and not engine.serves(module):
            engine = None
        if engine is not None:
            engine.saved.load_edited(checkpoint["state_dict"], strict=strict)
        else:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizers' state, and the engine's own."""
        states = checkpoint["optimizer_states"]
        # A checkpoint that `smp import` has made from another tool's weights: training begins with them.
        is_new = not states and not checkpoint.get("global_step")
        if not is_new and len(states) != len(self._strategy.optimizers):
            raise CheckpointError(
                f"The checkpoint has the state of {len(states)} optimizers, but `configure_optimizers` returns "
                f"{len(self._strategy.optimizers)}. Return as many, or load the weights only: "
                '`module.load_state_dict(torch.load(path)["state_dict"])`.'
            )
        for number, (optimizer, state) in enumerate(zip(self._strategy.optimizers, states, strict=not is_new)):
            if _is_by_name(state):
                source = {f"optimizer_{number}": state}
                self._engine().saved.load_stored_optimizer(source, number, unwrap(optimizer))
            else:
                self._engine().saved.load_optimizer_state(unwrap(optimizer), state)
        self._resume.load_state(checkpoint)

    # Paths

    @property
    def _has_own_io(self) -> bool:
        """Whether the user has a ``CheckpointIO`` plugin."""
        return type(self._strategy.checkpoint_io) is not self._tree.fabric("plugins.io.torch_io").TorchCheckpointIO

    def _is_plain_file(self, path: Any, storage_options: Any) -> bool:
        """Whether this package writes a full checkpoint itself."""
        return is_path(path) and not self._has_own_io and storage_options is None

    def _is_written_here(self, path: Any, storage_options: Any) -> bool:
        """Whether this package writes a full checkpoint itself, and now."""
        is_later = self._saves is None or self._saves.in_background
        return not is_later and self._is_plain_file(path, storage_options)

    # A run

    def with_values(self) -> AbstractContextManager[None]:
        """Context of a user's hook: what it asks the strategy for has values."""
        return self._streamed.with_values()

    def begin_processes(self) -> None:
        """Forget how an earlier run has failed; all ranks are together again."""
        self._is_torn = False
        self._stopped_together = None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Work that all ranks do together; an error in here leaves it half done."""
        try:
            yield
        except BaseException:
            self._is_torn = True
            raise

    def begin_run(self, trainer: Any, patches: ExitStack) -> None:
        """Let callbacks and loggers meet checkpoints that are written in the background, until ``patches`` close."""
        if self._is_sharded and trainer.checkpoint_callback is not None and trainer.state.fn == "fit":
            self._refuse_plugins(getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir)
        self._saves = AsyncSaves(in_background=self._config().async_save)
        kept = KeptCheckpoints(self._saves)
        patches.callback(kept.remove)
        kept.install(trainer.callbacks, trainer.loggers)
        self._streamed.install(trainer)
        self._install_pretrained()

    def _install_pretrained(self) -> None:
        """Let ``save_pretrained`` of models in the module take all ranks, also after the run, while it is spread."""
        for calls in self._pretrained:
            calls.remove()
        engine, module = self._engine(), self._strategy.lightning_module
        assert module is not None
        self._pretrained = [
            PretrainedCalls(part, partial(spread_model, engine, path, nullcontext), engine.saved.looking_as_built)
            for path, part in pretrained_parts(module)
        ]

    def check(self) -> None:
        """Raise the error of a save that has failed in the background."""
        if self._saves is not None:
            self._saves.check()

    def end_run(self, *, failed: bool) -> None:
        """Wait for the save in flight."""
        if self._saves is not None:
            self._saves.end(failed=failed)


def unwrap(optimizer: Any) -> Optimizer:
    """The user's optimizer inside a LightningOptimizer."""
    unwrapped: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return unwrapped


def _is_by_name(state: Mapping[str, Any]) -> bool:
    """Whether the optimizer state identifies parameters by name instead of by number."""
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def _is_forced_open() -> bool:
    """Whether PyTorch's environment variable allows arbitrary objects in checkpoint files."""
    return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true")


def _last_checkpoints(folder: str, callback: Any, trainer: Any) -> set[str]:
    """Addresses of the last checkpoints of a ModelCheckpoint in ``folder``; its ``_find_last_checkpoints``."""
    return named_in(folder, callback.CHECKPOINT_NAME_LAST, callback.FILE_EXTENSION)


@final
class KeptCheckpoints:
    """Patches the callbacks and loggers of a run, on the instances, to respect saves in flight.

    Links are replaced atomically: Lightning removes the old one first, and a run that is killed in between has none.
    """

    def __init__(self, saves: AsyncSaves) -> None:
        self._saves = saves
        self._callbacks: list[Any] = []
        self._patches = Patches()

    def install(self, callbacks: Iterable[Any], loggers: Iterable[Any]) -> None:
        """Replace the methods."""
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            self._replace(callback, "_link_checkpoint", self._linking)
            if self._saves.in_background:
                self._replace(callback, "file_exists", self._looking)
        for logger in loggers if self._saves.in_background else ():
            self._replace(logger, "after_save_checkpoint", self._announcing)

    def remove(self) -> None:
        """Restore the methods."""
        self._patches.give_back()

    def _replace(self, owner: Any, name: str, stand_in: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if callable(original) and name not in vars(owner):
            self._patches.put(owner, name, stand_in(original))

    def _linking(self, original: Any) -> Any:
        def link(trainer: Any, filepath: Any, linkpath: Any) -> None:
            if trainer.is_global_zero:
                self._saves.link(filepath, linkpath)
            trainer.strategy.barrier()

        return link

    def _looking(self, original: Any) -> Any:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            is_there = trainer.is_global_zero and self._saves.exists(filepath)
            return bool(trainer.strategy.reduce_boolean_decision(is_there, all=False))

        return file_exists

    def _announcing(self, original: Any) -> Any:
        def after_save_checkpoint(callback: Any) -> None:
            now = _as_it_is(next((each for each in self._callbacks if each == callback), callback))
            self._saves.announce(lambda: original(now))

        return after_save_checkpoint


def _as_it_is(callback: Any) -> Any:
    """A snapshot of a callback, which may describe the next checkpoint by the time the logger reads it."""
    copied = copy.copy(callback)
    for name, value in vars(copied).items():
        if isinstance(value, dict):
            vars(copied)[name] = dict(value)
    return copied
