"""A tensor without its values: what every stage knows of a tensor that lives on one of them."""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

__all__ = ["TensorSpec"]


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Metadata of a tensor. Hashed for every call of a program, so the hash is kept."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = hash((self.size, self.stride, self.dtype, self.device, self.requires_grad))
        object.__setattr__(self, "_hash", found)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes of dtypes differ between processes.
        return TensorSpec, (self.size, self.stride, self.dtype, self.device, self.requires_grad)

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The metadata of ``tensor``."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}" + (" with gradient" * self.requires_grad)
