"""Checkpoints by tag, with the names, files and meaning of SageMaker's model parallel library, for every door.

For custom training loops, and for hooks of frameworks. The functions own a folder with these entries::

    newest                  text: the tag of the checkpoint that was written last
    {tag}_partial/          weights, optimizers and the user's content, written by all ranks: the sharded form
    {tag}                   weights as one file, a state dict with plain names
    user_content_{tag}      the user's content to that

``newest`` is written when the checkpoint is complete, and older ones are deleted after that. Unlike SageMaker's, a
partial checkpoint does not freeze the partition: any layout reads it.

SageMaker's library has one model in a process. Here the model is given, or it is the only one that an engine of this
process runs (:mod:`smp_strategy.engine.active_engines`).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.sources import WholeState
from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.checkpoint.storage.full_file import read_full, write_full
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.remote_path import local_path
from smp_strategy.checkpoint.storage.sagemaker_folder import TaggedFolder
from smp_strategy.checkpoint.storage.torch_load import check_content, plain_content
from smp_strategy.distributed.rendezvous import alike, meet
from smp_strategy.engine.active_engines import attached
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import CheckpointError, ConfigError

__all__ = ["resume_from_checkpoint", "save_checkpoint"]


# Keys of the engine's own state and of the user's content in a partial checkpoint.
_ENGINE: Final = "smp_strategy"
_CONTENT: Final = "user_content"
_SCALE: Final = "loss_scale"

StateDict = dict[str, Any]


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Write a checkpoint of a model. Collective.

    When it returns the checkpoint is complete and ``newest`` names it, even if option ``async_save`` is set.

    Example::

        smp_strategy.save_checkpoint("checkpoints", tag=f"step_{step}", model=model, optimizer=optimizer,
                                     user_content={"step": step}, num_kept_partial_checkpoints=3)

    Args:
        path: the folder.
        tag: name of the checkpoint in it; one of the same name is replaced.
        partial: whether each rank writes its shard, with optimizers; otherwise rank 0 writes all weights as one file.
        model: ``None``: the only one that an engine of this process runs, with all optimizers that train it.
        optimizer: one or several; ``None`` beside a model: weights only.
        user_content: further state of the run, of which rank 0's is written: dicts, lists, tuples and sets of tensors,
            numbers, strings, bytes and ``None``. Numbers of numpy are written as those of Python, and configurations
            of Transformers as dicts.
        translate_if_full: accepted for scripts of SageMaker's library, without effect: names are always those of the
            model.
        num_kept_partial_checkpoints: number of partial checkpoints to keep, the newest ones; ``None``: all.

    Raises:
        ConfigError: the tag is no valid file name, the content could not be loaded again, or the model is ambiguous or
            missing.
        ApartError: not all ranks have made the call.
    """
    del translate_if_full
    engine = _engine_of(model)
    optimizers = list(engine.optimizers) if model is None and optimizer is None else _given(engine, optimizer)
    doing = f"saving {tag!r} to {path}"
    meet("smp_strategy.save_checkpoint")
    with alike(doing):
        folder = TaggedFolder(local_path(path), tag)
        folder.check_limit(num_kept_partial_checkpoints)
        if engine.mesh.rank == 0:
            user_content = plain_content(user_content, _CONTENT, engine.saved.note)
            check_content(user_content, _CONTENT)
    if partial:
        _save_partial(engine, optimizers, folder, user_content)
    else:
        state = engine.saved.full_state_dict()
        with alike(doing):
            if engine.mesh.rank == 0:
                _save_full(state, folder, user_content)
    with alike(doing):
        if engine.mesh.rank == 0:
            folder.announce()
            if num_kept_partial_checkpoints is not None:
                folder.delete_oldest(num_kept_partial_checkpoints)


def resume_from_checkpoint(  # noqa: PLR0913  # SageMaker's, and what to load into
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[StateDict], StateDict] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> Any:
    """Load a checkpoint of :func:`save_checkpoint`, under this or another layout. Collective.

    It may be called at any time. Before the first step, when the model is whole on every rank, optimizers get their
    state as soon as the model is partitioned; later, each rank reads its shard only.

    Args:
        path: the folder.
        tag: name of the checkpoint; ``None``: the newest one.
        partial: whether to load a partial checkpoint; otherwise one file with all weights, and no optimizer. Other
            programs, plain PyTorch for instance, may have written that file.
        strict: whether the names of weights must match.
        load_optimizer: whether to load optimizers, too.
        load_sharded_optimizer_state: ``False``: load only the options of optimizer groups (learning rates and so on).
            Moments are reset; master weights are the model's, which are loaded in any case.
        translate_function: changes the state dict in a file with all weights before it is loaded.
        model: ``None``: the only one that an engine of this process runs.
        optimizer: one or several, as when saving; ``None``: all that train the model.

    Returns:
        The user's content, tensors on the host; ``None`` if there is none.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or of another model or optimizer.
        ConfigError: the tag is no valid file name, arguments contradict each other, or the model is ambiguous or
            missing.
        RuntimeError: weights do not fit the model.
    """
    engine = _engine_of(model)
    optimizers = list(engine.optimizers) if optimizer is None else _given(engine, optimizer)
    if partial and translate_function is not None:
        raise ConfigError(
            "`translate_function` changes the state dict of a file with all weights, but `partial=True` loads one that "
            "was written by all ranks under the model's own names. Give `partial=False`, or leave it out."
        )
    meet("smp_strategy.resume_from_checkpoint")
    with alike(f"loading from {path}"):
        folder = TaggedFolder.to_read(local_path(path), tag, partial=partial)
        if not partial:
            return _load_full(engine, folder, translate_function, strict=strict)
        stored = CheckpointReader.open(folder.partial)
        rest = stored.rest()
        engine.saved.load_stored(stored, strict=strict)
        for number, each in enumerate(optimizers if load_optimizer else ()):
            engine.saved.load_stored_optimizer(stored, number, each, with_state=load_sharded_optimizer_state)
        _load_counters(engine, rest, scales=load_optimizer)
        return rest.get(_CONTENT)


def _save_partial(engine: Engine, optimizers: Sequence[Optimizer], folder: TaggedFolder, content: Any) -> None:
    prepared = engine.saved.prepared(engine.saved.held_state(optimizers), use="calls")
    own = engine.saved.state_dict()
    rest = {_ENGINE: own, _CONTENT: content, _SCALE: [each.scaler_state_dict() for each in engine.saved.scaled()]}
    note = {"layout": engine.mesh.shape.degrees, "global_step": own["num_steps"], "tag": folder.tag}
    prepared.write(folder.partial, rest=rest, note=note)


def _load_counters(engine: Engine, rest: Mapping[str, Any], *, scales: bool) -> None:
    """Load the counters of the engine's random streams and, if asked for, loss scales."""
    if _ENGINE in rest:
        engine.saved.load_state(rest[_ENGINE])
    found = rest.get(_SCALE, ()) if scales else ()
    if len(found) == len(scaled := engine.saved.scaled()):  # else they are of another door
        for each, scale in zip(scaled, found, strict=True):
            each.load_scaler_state_dict(scale)


def _save_full(state: StateDict, folder: TaggedFolder, content: Any) -> None:
    """Write a full checkpoint, content first: the file with all weights is complete by itself."""
    if content is None:
        commit.remove(folder.content)
    else:
        write_full(folder.content, {_CONTENT: content})
    write_full(folder.full, state)


def _load_full(
    engine: Engine, folder: TaggedFolder, translate: Callable[[StateDict], StateDict] | None, *, strict: bool
) -> Any:
    state: Any = read_full(folder.full)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{folder.full} has no state dict, but an object of type {type(state).__name__}.")
    if isinstance(state.get("state_dict"), Mapping):  # a checkpoint of Lightning
        state = state["state_dict"]
    if translate is not None:
        state = translate(dict(state))
    engine.saved.load_stored(WholeState({f"state_dict.{name}": value for name, value in state.items()}), strict=strict)
    return read_full(folder.content)[_CONTENT] if folder.content.exists() else None


def _engine_of(model: nn.Module | None) -> Engine:
    engines: list[Engine] = attached()
    if model is None:
        found = [engine for engine in engines if engine.is_attached] or engines
        if len(found) == 1:
            return found[0]
        names = ", ".join(sorted(type(engine.module).__name__ for engine in found)) or "none"
        raise ConfigError(
            f"It is not clear which model is meant: {len(found)} of this process are spread over the ranks ({names}). "
            "Give it as `model=...`, after `accelerator.prepare` or `smp.DistributedModel`, or in a hook that "
            "Lightning calls once the strategy is set up, `on_fit_start` for instance."
        )
    for bare in _unwrapped(model):
        found = [engine for engine in engines if engine.module is bare]
        if found:
            return next((engine for engine in found if engine.is_attached), found[-1])
    raise ConfigError(
        f"The model that is given, {type(model).__name__}, is none that is spread over the ranks. Give the one that "
        "`accelerator.prepare` has returned, or the LightningModule itself, in a hook that Lightning calls once the "
        "strategy is set up (`on_fit_start` for instance), and no part of it."
    )


def _unwrapped(model: nn.Module) -> Iterable[nn.Module]:
    """Yield ``model``, and the modules inside if it is a wrapper."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        yield inner
        inside = vars(inner).get("_modules", {})
        inner = inside.get("_orig_mod") or (inside.get("module") if len(inside) == 1 else None)


def _given(engine: Engine, optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return the bare optimizers, which may be given in wrappers of frameworks."""
    if optimizer is None:
        return []
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    return [_known(engine, each) for each in given]


def _known(engine: Engine, optimizer: Any) -> Optimizer:
    known = {id(each): each for each in engine.optimizers}
    inner = optimizer
    while inner is not None and id(inner) not in known:
        inner = getattr(inner, "optimizer", None)
    if inner is None:
        raise ConfigError(
            f"The optimizer that is given, {type(optimizer).__name__}, is none of those that train the model. Give one "
            "that was prepared together with it, or that `configure_optimizers` has returned."
        )
    return known[id(inner)]
