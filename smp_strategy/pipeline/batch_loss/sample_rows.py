"""Rows of a tensor that belong to some of the samples, found by changing these samples."""

from typing import NamedTuple, final

import torch
from torch import Tensor

__all__ = ["Rows", "rows_of_changes"]


@final
class Rows(NamedTuple):
    """Places along a dim of a tensor that belong to some samples, and those of the others."""

    dim: int | None
    """``None``: all elements are of several samples."""
    first: Tensor
    other: Tensor

    def changes(self, value: Tensor, changed: Tensor) -> list[Tensor]:
        """``value``; with the first rows ``changed``, with the others, and with both."""
        assert self.dim is not None
        shape = [1] * value.ndim
        shape[self.dim] = -1
        first, other = (each.to(value.device).view(shape) for each in (self.first, self.other))
        return [value, *(torch.where(each, changed, value) for each in (first, other, first | other))]


def rows_of_changes(value: Tensor, first: Tensor, other: Tensor) -> Rows | None:
    """Rows of ``value`` that are others in ``first`` and in ``other``, for which some samples, or the others, were
    changed; ``None``: nothing is known.
    """
    if value.shape != first.shape or value.shape != other.shape or not value.numel():
        return None
    changed = [(value != each) & ~(value.isnan() & each.isnan()) for each in (first, other)]
    for dim in range(value.ndim):
        mine, theirs = (each.movedim(dim, 0).flatten(1).any(1) if value.ndim > 1 else each for each in changed)
        if bool(mine.any()) and bool(theirs.any()) and not bool((mine & theirs).any()):
            return Rows(dim, mine, theirs)
    return Rows(None, *changed) if bool((changed[0] & changed[1]).any()) else None
