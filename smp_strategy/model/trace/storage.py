"""Which memory a tensor stands in: several tensors may be views of one storage."""

from torch import Tensor

__all__ = ["storage_of"]


def storage_of(tensor: Tensor) -> int:
    """What stands for the storage of ``tensor``, while that is alive."""
    return tensor.untyped_storage()._cdata
