"""Loading what ``torch.save`` has written, whoever did: values are read when they are used, and errors are clear.

Nothing that a file names is run, unless its reader asks for that.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from smp_strategy.checkpoint.storage.torch_load import allowing_plain_values, load_failure
from smp_strategy.errors import CheckpointError, DamagedError

__all__ = ["load_file"]


def load_file(path: Path, *, weights_only: bool) -> Any:
    """What a file has, in host memory.

    Args:
        path: of the file.
        weights_only: see ``torch.load``.

    Raises:
        CheckpointError: it cannot be loaded without running code.
        DamagedError: it is damaged, or no checkpoint.
        FileNotFoundError, PermissionError: it cannot be opened.
    """
    try:
        with allowing_plain_values():
            return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if not _begins_well(path):
            told = f"{path} is damaged, or no checkpoint: no file of PyTorch begins as it does."
            raise DamagedError(told) from error
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} {load_failure(error)} Load it with `weights_only=False` if you trust whoever wrote it; or "
                "allow its classes, if you know them, by `torch.serialization.add_safe_globals`."
            ) from error
        if not weights_only and not isinstance(error, RuntimeError | EOFError | pickle.UnpicklingError):
            raise  # of a class of the user
        raise DamagedError(f"{path} is damaged, or no checkpoint: {type(error).__name__}: {reason}") from error


def _begins_well(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2).startswith((b"PK", b"\x80"))  # an archive, or a pickle
