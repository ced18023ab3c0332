"""The strategy's hooks for checkpoints, in both of their forms, which any layout reads.

What Lightning calls, on all ranks::

    Trainer.save_checkpoint   lightning_module_state_dict, optimizer_state per optimizer, hooks of callbacks and module
                              save_checkpoint, barrier
    ModelCheckpoint           that, then remove_checkpoint for what is not kept, and a link for `save_last="link"`
    ckpt_path=...             load_checkpoint, hooks of the module, load_model_state_dict, hooks of callbacks
                              load_optimizer_state_dict (fit only), hooks of loops and schedulers

*Full*: global rank 0 gets all tensors and writes one ordinary file; other ranks see their names, shapes and types.
*Sharded*: tensors stay where they are; the hooks see what each rank holds of them, and all ranks write a directory.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.sources import EditedState
from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.full_file import read_full, write_full
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor
from smp_strategy.checkpoint.storage.lazy_tensor import LazyStoredTensor
from smp_strategy.checkpoint.storage.reader import CheckpointReader, is_sharded
from smp_strategy.checkpoint.storage.torch_load import allowing_plain_values
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.rendezvous import meet
from smp_strategy.errors import CheckpointError, PeerFailedError, UnsupportedError
from smp_strategy.integrations.lightning.async_saves import AsyncSaves, KeptCheckpoints
from smp_strategy.integrations.lightning.checkpoint_content import divided, listed, put_together, snapshot
from smp_strategy.integrations.lightning.resume import ResumeHooks
from smp_strategy.integrations.lightning.sigterm import have_all_stopped

__all__ = ["CheckpointHooks", "unwrap"]

# What `smp` needs to give the state of optimizers in a full file names; Lightning passes over it.
PARAMETER_NAMES: Final = "smp_strategy/parameter_names"


class CheckpointHooks(ResumeHooks):
    """The strategy's hooks that save and load. See the module's docstring."""

    _saves: AsyncSaves | None = None
    _has_failed: bool
    # An error has come out of a step: ranks may be in different places of it.
    _is_torn = False
    # Whether all ranks were stopped by the error that ends the run; None: nobody has asked.
    _stopped_together: bool | None = None
    _stand_ins: ExitStack

    @property
    def _is_sharded(self) -> bool:
        return self.config.state_dict_type == "sharded"

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights under their plain names, as the module's docstring says. Collective."""
        self._refuse_alone()
        meet("trainer.save_checkpoint")
        if self._is_sharded:
            return _with_all_names(self.engine.saved.held_state(())["state_dict"])
        return _described_elsewhere(self.engine.saved.full_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """All of the optimizer's state: as one process has it, or what this rank holds of it. Collective."""
        if self._is_sharded:
            state: dict[str, Any] = self.engine.saved.held_state((unwrap(optimizer),))["optimizer_0"]
            return state
        return _described_elsewhere(self.engine.saved.full_optimizer_state(unwrap(optimizer)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write it, or begin to; the Trainer lets all ranks wait for each other afterwards. Collective."""
        self._add_own_state(checkpoint)
        if not self._is_sharded and "optimizer_states" in checkpoint:
            checkpoint[PARAMETER_NAMES] = self._parameter_names()
        saves = self._saves
        assert saves is not None
        saves.wait()
        path = self._local(self.broadcast(filepath))
        if self._is_sharded:
            if path is None or self._has_own_io or storage_options is not None:
                raise UnsupportedError(
                    f"{filepath} cannot be written with `state_dict_type='sharded'`: all ranks write to a folder that "
                    'all of them see, past plugins (`CheckpointIO`) and other storages. Use `state_dict_type="full"`, '
                    "or save to a path and copy the folder."
                )
            self._save_sharded(checkpoint, path, saves)
        elif self.global_rank == 0:
            self._save_full(checkpoint, filepath, path, storage_options, saves)

    def _parameter_names(self) -> list[list[list[str]]]:
        """For each optimizer, and each of its groups, the names of the parameters, which PyTorch numbers."""
        assert self.lightning_module is not None
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        groups = [unwrap(optimizer).param_groups for optimizer in self.optimizers]
        return [[[names.get(each, "") for each in group["params"]] for group in of_one] for of_one in groups]

    def _save_sharded(self, checkpoint: dict[str, Any], path: Path, saves: AsyncSaves) -> None:
        state, rest = divided(checkpoint)
        if saves.in_background and self.global_rank == 0:
            rest = snapshot(rest)
        saves.save_sharded(path, state, rest=rest, note=self._note(checkpoint))

    def _save_full(
        self, checkpoint: dict[str, Any], given: Any, path: Path | None, options: Any, saves: AsyncSaves
    ) -> None:
        if saves.in_background:
            # What is spread has been collected, into tensors that nobody else knows.
            fresh = {id(leaf) for leaf in pytree.tree_leaves(checkpoint["state_dict"])} if self.engine.is_spread else ()
            checkpoint = snapshot(checkpoint, lambda tensor: id(tensor) in fresh)
        if path is None or self._has_own_io or options is not None:
            io = self.checkpoint_io
            saves.save(Path(given), lambda: io.save_checkpoint(checkpoint, given, storage_options=options))
        else:
            saves.save(path, lambda: write_full(path, checkpoint))

    def _note(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        counts = {key: int(checkpoint[key]) for key in ("global_step", "epoch") if key in checkpoint}
        return {"layout": self.engine.mesh.shape.degrees, **counts}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove one of either form, on global rank 0; not before a newer one is there that is being written."""
        if self.global_rank != 0:
            return
        path, io = self._local(filepath), self.checkpoint_io
        if self._saves is None:
            super().remove_checkpoint(filepath)
        elif path is None or self._has_own_io:
            self._saves.remove(Path(filepath), lambda: io.remove_checkpoint(filepath))
        else:
            self._saves.remove(path)

    def _refuse_alone(self) -> None:
        """An error has ended the run, and a callback wants a checkpoint of that: if all ranks do, of the same step.

        Otherwise the error goes on its way, as if nobody had asked for one.
        """
        error, trainer = sys.exception(), getattr(self.lightning_module, "_trainer", None)
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
        self.on_exception(error)
        trainer._teardown()
        raise error

    # Loading

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether weights are loaded when the engine exists, which remembers them for tensors without memory."""
        return self.config.delayed_parameter_initialization

    def recover_checkpoints(self, trainer: Any) -> None:
        """Before anybody looks for the last one: put back those that a save has moved aside when it was killed."""
        folders = {trainer.default_root_dir}
        for callback in trainer.checkpoint_callbacks:
            if (resolve := getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)) is not None:
                folders.add(resolve(trainer))
        for path in filter(None, map(self._local, folders)):
            commit.recover_all(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Either form. Of a directory, tensors are read when they are used.

        Args:
            checkpoint_path: file, directory or URL.
            weights_only: whether nothing but tensors and plain values may be in it, so that no file can run code;
                ``None``: as the option ``checkpoint_weights_only`` says.

        Raises:
            CheckpointError: it is damaged, or has more in it than it may.
        """
        if self._saves is not None:
            self._saves.wait()
        if weights_only is None:
            weights_only = self.config.checkpoint_weights_only and not _is_forced_open()
        checkpoint_path = self.broadcast(checkpoint_path)
        path = self._local(checkpoint_path)
        with allowing_plain_values():
            if path is not None and is_sharded(path):
                directory = CheckpointReader.open(path)
                checkpoint = put_together(directory, directory.rest(weights_only=weights_only))
            elif path is None or self._has_own_io:
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            else:
                checkpoint = listed(_read_by_all(path, weights_only, verifies=self.local_rank == 0))
        if "state_dict" not in checkpoint:
            raise CheckpointError(
                f"{checkpoint_path} has no `state_dict`, so it is none of Lightning's checkpoints (there are "
                f"{', '.join(map(repr, checkpoint)) or 'no entries'}). `smp import` makes one of it."
            )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's share of the weights; before the first step that is all of them."""
        module = self.lightning_module
        assert module is not None
        engine = self._engine if self._engine is not None and self._engine.serves(module) else None
        is_unread = any(isinstance(value, LazyStoredTensor) for value in checkpoint["state_dict"].values())
        lacks_values = any(parameter.is_meta for parameter in module.parameters())
        if engine is not None and is_unread and (engine.is_spread or lacks_values):
            engine.saved.load_stored(EditedState({"state_dict": checkpoint["state_dict"]}), strict=strict)
        elif engine is not None:
            engine.saved.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's share of the optimizers' state and the engine's own."""
        states = checkpoint["optimizer_states"]
        # Weights of others, which `smp import` has made a checkpoint of: training begins with them.
        is_new = not states and not checkpoint.get("global_step")
        if not is_new and len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has the state of {len(states)} optimizers, but `configure_optimizers` returns "
                f"{len(self.optimizers)}. Return as many, or load the weights only: "
                '`module.load_state_dict(torch.load(path)["state_dict"])`.'
            )
        for number, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=not is_new)):
            if _is_by_name(state):
                source = EditedState({f"optimizer_{number}": state})
                self.engine.saved.load_stored_optimizer(source, number, unwrap(optimizer))
            else:
                self.engine.saved.load_optimizer_state(unwrap(optimizer), state)
        self._load_own_state(checkpoint)

    # Where

    @property
    def _has_own_io(self) -> bool:
        """Whether the user has a plugin that reads and writes files."""
        return type(self.checkpoint_io) is not self.tree.fabric("plugins.io.torch_io").TorchCheckpointIO

    def _local(self, path: Any) -> Path | None:
        """A path that the operating system knows; ``None``: it is a URL of something else."""
        if not self.tree.fabric("utilities.cloud_io")._is_local_file_protocol(path):
            return None
        return Path(str(path).removeprefix("file://").removeprefix("local://"))

    # A run

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What happens in here is done by all ranks, or half done."""
        try:
            yield
        except BaseException:
            self._is_torn = True
            raise

    def _begin_saving(self, trainer: Any) -> None:
        """A run begins: its callbacks and loggers meet checkpoints that are written in the background."""
        self._saves = AsyncSaves(self.engine.mesh.saving_group, in_background=self.config.async_save)
        kept = KeptCheckpoints(self._saves, self._local)
        self._stand_ins.callback(kept.remove)
        kept.install(trainer.callbacks, trainer.loggers)

    def _look_after_saves(self) -> None:
        """Raise what has gone wrong in the background."""
        if self._saves is not None:
            self._saves.check()

    def _end_saving(self) -> None:
        """Wait for what is being written; nobody will later."""
        if self._saves is not None:
            self._saves.end(failed=self._has_failed)


def unwrap(optimizer: Any) -> Optimizer:
    """The user's optimizer inside a LightningOptimizer."""
    unwrapped: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return unwrapped


def _is_by_name(state: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer names parameters, and does not number them."""
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def _read_by_all(path: Path, weights_only: bool, *, verifies: bool) -> dict[str, Any]:
    """The content of a file, which one rank of each node reads as a whole first, to verify it. Collective.

    Raises:
        CheckpointError: on all ranks; it is not there, damaged, or cannot be loaded without running code.
    """
    content, problem = None, None
    try:
        if verifies:
            content = read_full(path, weights_only=weights_only)
    except Exception as error:
        problem = error
    problems: list[tuple[str, str] | None] = []
    if dist.is_initialized():
        mine = problem if problem is None else (type(problem).__name__, str(problem))
        problems = collectives.gather_objects(mine, f"the verification of {path}")
    if problem is not None:
        raise problem
    for kind, text in filter(None, problems):
        raise CheckpointError(f"{path} cannot be loaded, as another rank has found: {kind}: {text}")
    if content is None:
        content = read_full(path, weights_only=weights_only, verify=False)
    return dict(content)


def _is_forced_open() -> bool:
    """Whether the environment says, as to PyTorch, that files may have anything in them."""
    return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true")


def _described_elsewhere(state: dict[str, Any]) -> dict[str, Any]:
    """``state``, which global rank 0 has, with tensors without memory on the others. Collective.

    Hooks of the user, who drop or rename entries, find them on all ranks then.
    """

    def described(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf

    found = collectives.tell(pytree.tree_map(described, dict(state)), 0, "the entries of a checkpoint")
    return state or found


def _with_all_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank holds, with everything else by name, shape and type only. Collective.

    A tensor with several names is one object under all of them.
    """
    mine = {
        name: (each.shape, each.dtype, each.aliases) for name, each in state.items() if isinstance(each, HeldTensor)
    }
    everyones = collectives.gather_objects(mine, "the names of a checkpoint's tensors")
    whole: dict[str, Any] = {}
    for name, value in state.items():
        whole.update(dict.fromkeys((name, *(value.aliases if isinstance(value, HeldTensor) else ())), value))
    for described in everyones:
        for name, (shape, dtype, aliases) in described.items():
            if name not in whole:
                whole.update(
                    dict.fromkeys((name, *aliases), HeldTensor(shape=shape, dtype=dtype, blocks=(), aliases=aliases))
                )
    return whole
