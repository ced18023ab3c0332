"""Read and write the checkpoint files of Accelerate, for full states."""

import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state, save_custom_state
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, load, save
from safetensors.torch import load_file

from smp_strategy.engine.saving.saved_models.state_folders import reading
from smp_strategy.errors import CheckpointError

__all__ = ["mapped", "name", "read", "read_custom", "state", "weights", "write", "write_weights"]

_CUSTOM: Final = "custom_checkpoint_{}.pkl"


def name(first: str, number: int) -> str:
    """File name of object ``number``: ``optimizer.bin``, ``optimizer_1.bin``."""
    return first if number == 0 else first.replace(".", f"_{number}.")


def write(accelerator: Any, folder: Path, custom: list[Any]) -> None:
    """Write everything but models and optimizers; ``custom`` are the states of the user's registered objects."""
    each_node = accelerator.project_configuration.save_on_each_node
    save_accelerator_state(
        str(folder),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        0,
        accelerator.step,
        accelerator.scaler,
        save_on_each_node=each_node,
    )
    for number, state in enumerate(custom):
        known = SimpleNamespace(state_dict=lambda state=state: state)
        save_custom_state(known, str(folder), number, save_on_each_node=each_node)
        _warn_of_code(folder / _CUSTOM.format(number))


def write_weights(
    states: Mapping[int, dict[str, Any]], folder: Path, *, safe_serialization: bool, save_on_each_node: bool
) -> None:
    """Write state dicts of models by their numbers, on the processes that write."""
    file = f"{SAFE_MODEL_NAME}.safetensors" if safe_serialization else f"{MODEL_NAME}.bin"
    for number, state in states.items():
        path = folder / name(file, number)
        save(state, path, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)


def weights(folder: Path, number: int) -> dict[str, Any]:
    """Load the weights of model ``number`` on the host. Tensors are read from the file lazily, at their first use."""
    safe, pickled = (folder / name(each, number) for each in (f"{SAFE_MODEL_NAME}.safetensors", f"{MODEL_NAME}.bin"))
    found: dict[str, Any]
    if safe.exists():
        with reading(safe):
            found = load_file(safe, device="cpu")
    elif pickled.exists():
        found = state(pickled)
    else:
        raise FileNotFoundError(
            f"{folder} has no weights for model {number}: neither {safe.name} nor {pickled.name} is there. Load a "
            "folder that `accelerator.save_state` has written with as many models, or take the model out of the list "
            "in a hook of `register_load_state_pre_hook`."
        )
    return found


def mapped(path: Path, **options: Any) -> Any:
    """Load a file of ``torch.save`` on the host. Tensors are read from the file lazily, at their first use.

    So a rank that takes its shard of them needs no memory for the rest.
    """
    with reading(path):
        return load(path, map_location="cpu", **{"mmap": zipfile.is_zipfile(path), **options})


def state(path: Path, *keys: str, **options: Any) -> dict[str, Any]:
    """Load a file of ``torch.save`` that must hold a dict with ``keys``; see :func:`mapped`."""
    found = mapped(path, **options)
    if isinstance(found, Mapping) and all(key in found for key in keys):
        return found  # type: ignore[return-value]  # as the file has it: an OrderedDict has attributes
    has = (
        f"a dict without `{keys[0]}`"
        if isinstance(found, Mapping)
        else f"an object of the class {type(found).__name__}"
    )
    raise CheckpointError(
        f"{path} has {has}, so `accelerator.save_state` has not written it. Load a folder that it has written."
    )


def read(accelerator: Any, folder: Path, data_rank: int, load_kwargs: dict[str, Any]) -> None:
    """Read the states that all ranks of a pipeline share: all but models, optimizers and the user's registered objects.

    Random generators are those of the data rank, whose number Accelerate takes for that of the process.
    """
    with reading(folder):
        load_accelerator_state(
            str(folder),
            [],
            [],
            accelerator._schedulers,
            accelerator._dataloaders,
            data_rank,
            accelerator.scaler,
            "cpu",
            load_kwargs,
        )
    saved = sum(1 for each in folder.iterdir() if re.fullmatch(r"custom_checkpoint_\d+\.pkl", each.name))
    registered = len(accelerator._custom_objects)
    if saved != registered:
        raise RuntimeError(
            f"Number of custom checkpoints in folder {folder} does not match the number of registered objects: found "
            f"{saved} checkpoints, but {registered} objects are registered. Register the same objects, in the same "
            "order, as the run that has saved: `accelerator.register_for_checkpointing`."
        )


def read_custom(folder: Path, number: int, take: Callable[[Any], None], load_kwargs: dict[str, Any]) -> None:
    """Pass the state of a registered object of the user to ``take``."""
    take(mapped(folder / _CUSTOM.format(number), **load_kwargs))


def _warn_of_code(path: Path) -> None:
    """Warn of objects that ``load_state`` will refuse by default."""
    if path.is_file() and (found := torch.serialization.get_unsafe_globals_in_checkpoint(path)):
        warnings.warn(
            f"{path.name} has objects of {', '.join(found)}, which files may not make when they are loaded. Let "
            "`state_dict` of what is registered for checkpointing return tensors and plain values, or load it with "
            '`accelerator.load_state(load_kwargs={"weights_only": False})`.',
            stacklevel=2,
        )
