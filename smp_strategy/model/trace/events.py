"""Execution trace of one microbatch's program: its calls in order, and the values that they take and return.

Every pipeline rank executes the same program, so every rank writes the same trace. It is plain data: the partitioner
reads costs from it, the router the stage of each call, and the scheduler their order.

A *value* is a tensor that depends on a unit, numbered in order of creation. An *event* is one call: of a unit, of a
single operation of the glue, or a read of a value by Python code (``.item()``, ``if loss > x``); or it brings a
tensor into the program that existed before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from smp_strategy.model.trace.work import Efforts, SavedBytes

__all__ = ["Event", "Trace", "Value"]


class Value(NamedTuple):
    """A tensor of one pipeline stage, as the other stages know it."""

    id: int
    """Number within the microbatch, in order of creation."""
    nbytes: int
    requires_grad: bool


class Event(NamedTuple):
    """One call of the program."""

    kind: Literal["unit", "op", "read", "given"]
    """``given``: no call, but a tensor from outside of the program that the stages ``home`` hold already."""
    name: str
    """Qualified name of the unit, or name of the operation."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    effort: Efforts = Efforts()
    """Kernel costs of its passes."""
    saved_bytes: int = 0
    """Bytes that autograd keeps for the backward pass, parameters excluded."""
    home: tuple[int, ...] = ()
    """Stages that hold a ``given`` tensor."""
    kept: SavedBytes = SavedBytes()
    """Details of the saved bytes, if known."""
    again_bytes: int = 0
    """Further bytes on the device while its backward runs, if it is recomputed."""
    offloaded_bytes: int = 0
    """Bytes in host memory until backward, beside ``saved_bytes`` on the device."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for two events that are the same step of the same path (sizes may differ)."""
        inputs = tuple(value.id for value in self.inputs)
        outputs = tuple((value.id, value.requires_grad) for value in self.outputs)
        return (self.kind, self.name, self.home, inputs, outputs)


@final
@dataclass(frozen=True)
class Trace:
    """All events of one microbatch, and the value that backward starts from."""

    events: Sequence[Event]
    loss: int | None = None
    """Number of the loss value; ``None`` for a forward-only step or a loss that depends on no unit."""
    path: tuple[tuple[object, ...], ...] = field(init=False, repr=False, compare=False)
    """Signatures of the events."""
    signature: int = field(init=False)
    """Equal for microbatches that took the same path."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the events, or their kinds if they have no name."""
        return tuple(event.name or event.kind for event in self.events)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", tuple(event.signature for event in self.events))
        object.__setattr__(self, "signature", hash((self.path, self.loss)))
