"""Where tensors and objects come from, to whoever takes them: a directory, or a state that is in memory as a whole."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from smp_strategy.checkpoint.storage.held_tensor import HeldTensor

__all__ = ["TensorInfo", "Source"]


class TensorInfo(Protocol):
    """A tensor without its values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""


class Source(Protocol):
    """Tensors and other objects by their names: ``state_dict.layer.weight``, ``optimizer_0.param_groups``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors that there are."""

    @property
    def objects(self) -> Collection[str]:
        """The names of everything else."""

    def fill(self, wanted: Mapping[str, HeldTensor]) -> None:
        """Write the values of tensors to the blocks of this rank.

        Raises:
            CheckpointError: a value cannot be had, or its shape is another one.
        """

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Objects by their names."""
