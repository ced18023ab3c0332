"""Interface of states to load from: a sharded folder, or a state dict in memory."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor

__all__ = ["TensorInfo", "Source"]


class TensorInfo(Protocol):
    """Metadata of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""


class Source(Protocol):
    """Tensors and other objects by their names: ``state_dict.layer.weight``, ``optimizer_0.param_groups``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Metadata of all tensors."""

    @property
    def objects(self) -> Collection[str]:
        """Names of everything else."""

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Copy the values of tensors to this rank's rectangles.

        Raises:
            CheckpointError: a value cannot be read, or its shape is another one.
        """

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
