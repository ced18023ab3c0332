"""Tensor operations that read metadata only (shape, dtype, device, layout), never values."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["METADATA"]

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
