"""Search for NaN and infinity: the unit, stage and microbatch in which they first appeared.

Each unit notes whether its outputs, and in backward the gradients of these, are finite: a flag on the device, which
nobody waits for. Only when gradients turn out not to be finite, on any rank, all ranks read their flags and compare
them. An infinity that stays without consequences, in an attention mask for instance, is no finding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from smp_strategy.model.trace.pytree import flatten_result

__all__ = ["FlagRecord", "NonfinitePolicy", "NonfiniteSearch", "first_cause"]

NonfinitePolicy = Literal["raise", "skip", "ignore"]


class FlagRecord(NamedTuple):
    """Values that are not finite."""

    step: int
    microbatch: int
    part: Literal["output", "loss", "gradient"]
    """``gradient``: of the unit's output."""
    unit: str
    """Name of the unit; empty for a loss."""


@final
class NonfiniteSearch:
    """Flags of this rank since the last update.

    Attributes:
        step: number of the training step that runs.
    """

    def __init__(self) -> None:
        self.step = 0
        self._flags: list[tuple[FlagRecord, Tensor]] = []

    def around(self, unit: str, function: Callable[..., Any], microbatch: int) -> Callable[..., Any]:
        """``function``, the forward of ``unit``, with flags for its outputs and their gradients."""

        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            output = FlagRecord(self.step, microbatch, "output", unit)
            for leaf in flatten_result(result)[0]:
                if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                    self._note(output, leaf)
                    if leaf.requires_grad and torch.is_grad_enabled():
                        leaf.register_hook(lambda gradient: self._note(output._replace(part="gradient"), gradient))
            return result

        return run

    def add_losses(self, losses: Sequence[Tensor | None]) -> None:
        """Note the losses of the microbatches of this step."""
        for number, loss in enumerate(losses):
            if loss is not None:
                self._note(FlagRecord(self.step, number, "loss", ""), loss)

    def clear(self) -> None:
        """Forget all flags."""
        self._flags.clear()

    def found(self) -> list[FlagRecord]:
        """What was not finite; waits for the device."""
        return [record for record, is_finite in self._flags if not is_finite.item()]

    def _note(self, record: FlagRecord, tensor: Tensor) -> None:
        self._flags.append((record, torch.isfinite(tensor.detach()).all()))


def first_cause(found: Sequence[FlagRecord], stage_of: Mapping[str, int]) -> str:
    """Where NaN or infinity came from, in words; ``stage_of`` has the units in the order in which they run."""
    order = {unit: number for number, unit in enumerate(stage_of)}
    forward = [record for record in found if record.part != "gradient"]
    if forward:
        # A loss that is not finite because of a unit comes after it.
        first = min(forward, key=lambda each: (each.step, each.microbatch, order.get(each.unit, len(order))))
        where = f"microbatch {first.microbatch} of training step {first.step}"
        if first.part == "loss":
            return f"the loss of {where}; the outputs of all units are finite"
        return f"the output of unit `{first.unit}` (stage {stage_of[first.unit]}) in {where}"
    if not found:
        return "the gradients of weights; outputs of units and their gradients are finite"
    # Backward runs from the last unit to the first: the cause lies behind the last one whose gradient is affected.
    step, microbatch = min((each.step, each.microbatch) for each in found)
    names = list(order)
    last = max(order[each.unit] for each in found if (each.step, each.microbatch) == (step, microbatch))
    where = f"microbatch {microbatch} of training step {step}"
    if last + 1 == len(names):
        return f"the backward of the loss, in {where}; the losses are finite"
    cause = names[last + 1]
    return f"the backward of unit `{cause}` (stage {stage_of[cause]}) in {where}; the losses are finite"
