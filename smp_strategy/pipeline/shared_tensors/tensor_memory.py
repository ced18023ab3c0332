"""Memory of placed tensors, which views share, and its in-place changes
(:mod:`smp_strategy.pipeline.shared_tensors.aliasing`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["Change", "TensorMemory"]


@final
class TensorMemory:
    """Memory that a placed tensor shares with its views; an in-place change through one of them reaches them all.

    Made for every placed tensor and rarely changed, so the initial values are class attributes.
    """

    is_plain: bool = False
    """Whether the memory belongs to a tensor that exists on every stage."""
    version: int = 0
    whole: TensorSpec | None = None
    """Metadata of the tensor to whom the memory belongs, once another shares it."""
    changes: "Sequence[Change]" = ()
    """The latest change of the whole memory, and all later ones; none of the time before the memory was shared."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """In-place change of a memory that tensors share."""

    version: int
    """Number of the change, from 1 on."""
    result: Any
    """The changed placed tensor as it was after the change, with a memory of its own."""
    family: int
    offset: int | None
    copy: object
    """Attributes of the changed tensor."""
    is_recorded: bool
    """Whether autograd recorded it."""
