"""Contents as a file of Lightning, as a sharded directory, or as safetensors.

All is written beside its place and moved there when it is complete, so whatever goes wrong leaves what was there.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp_strategy.conversion.contents import Contents, LazyTensor, map_tensors
from smp_strategy.conversion.hugging_face import copy_configuration
from smp_strategy.conversion.parameter_numbers import numbered_groups
from smp_strategy.conversion.safetensors_files import write_safetensors
from smp_strategy.errors import CheckpointError

__all__ = ["Progress", "cast", "lightning_rest", "write_full", "write_hugging_face", "write_sharded"]

Progress = Callable[[str], None]


def cast(weights: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Floating point tensors in ``dtype``; ``None``: as they are."""
    if dtype is None:
        return dict(weights)

    def change(value: Any) -> Any:
        if not isinstance(value, LazyTensor) or not value.dtype.is_floating_point:
            return value
        return value.changed(lambda tensor: tensor.to(dtype), dtype)

    return {name: change(value) for name, value in weights.items()}


def lightning_rest(contents: Contents) -> dict[str, Any]:
    """What a Lightning checkpoint has besides weights and optimizers; of a run at its beginning, if there is none."""
    if contents.is_lightning:
        return contents.rest
    for package in ("lightning", "pytorch-lightning"):
        try:
            found = version(package)
            break
        except PackageNotFoundError:
            continue
    else:
        raise CheckpointError("Lightning is not installed, and its checkpoints say which version has written them.")
    return {"epoch": 0, "global_step": 0, "pytorch-lightning_version": found, "lr_schedulers": [], **contents.rest}
