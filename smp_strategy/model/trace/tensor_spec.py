"""Tensor metadata (size, stride, dtype, device, requires_grad), and the identity of a storage.

Tensor operations that read metadata only (shape, dtype, device, layout), never values.
"""

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import local

__all__ = ["TensorSpec", "storage_of", "METADATA"]


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Metadata of a tensor, known to every stage.

    It is compared and hashed at every call of a program, so derived values are stored.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the elements."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.size) * self.dtype.itemsize)
        try:
            found = hash((self.size, self.stride, self.dtype, self.device, self.requires_grad))
        except TypeError:  # symbolic sizes have no hash; such metadata is no part of a key
            found = 0
        object.__setattr__(self, "_hash", found)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes of dtypes and device numbers differ between processes, so both are made again on arrival.
        return _from_elsewhere, (self.size, self.stride, self.dtype, self.device, self.requires_grad)

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}" + (" with gradient" * self.requires_grad)


def _from_elsewhere(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> TensorSpec:
    return TensorSpec(size, stride, dtype, local(device), requires_grad)


def storage_of(tensor: Tensor) -> int:
    """Identity of the storage of ``tensor``, valid while the storage is alive."""
    return tensor.untyped_storage()._cdata


METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "names", "itemsize", "nbytes"),
                *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu"),
                *("is_mkldnn", "is_mtia", "is_maia", "is_vulkan", "is_ipu", "is_sparse_csr"),
            )
            if hasattr(Tensor, name)
        ),
        *(
            getattr(Tensor, name)
            for name in (
                *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"),
                *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj", "is_neg"),
                *("is_inference", "get_device", "__len__", "is_same_size"),
            )
        ),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_conj, torch.is_neg),
        torch.is_inference,
    }
)
