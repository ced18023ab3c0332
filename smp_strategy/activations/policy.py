"""Activation policy of a unit: keep, recompute (activation checkpointing), offload to the host, or a mixture.

Activations are most of what a stage holds during a step. A policy is a plain value: chosen from the user's options
(:mod:`smp_strategy.activations.selection`), priced by the predictions of memory and time, and carried out by
:mod:`smp_strategy.activations.unit_wrapper`. All policies give the same numbers.

Statistics of activation offload in one step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

__all__ = ["KEEP", "Recompute", "ActivationPolicy", "ActivationPolicies", "OffloadStats"]


Recompute = Literal["no", "all", "cheap"]


@final
@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """Activations of one unit: kept, recomputed or offloaded."""

    recompute: Recompute = "no"
    """``all``: the unit keeps its inputs and runs again in backward. ``cheap`` (selective checkpointing): it also keeps
    the results of matrix products, convolutions and attention, and recomputes the rest."""
    offload: bool = False
    """Move kept tensors to host memory until shortly before their backward."""
    group: int | None = 1
    """Number of consecutive calls, of units in one list of modules, that are recomputed together: later ones keep no
    input that an earlier one has produced. ``None``: all that follow each other on a stage."""
    preserve_rng_state: bool = True
    """Draw the same random numbers when recomputing."""

    @property
    def is_default(self) -> bool:
        """Whether autograd keeps whatever it saves."""
        return self.recompute == "no" and not self.offload


KEEP = ActivationPolicy()

ActivationPolicies = Mapping[str, ActivationPolicy]
"""Policies by unit name; units that are not named keep everything."""


@final
@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Traffic between the device and the host in one step."""

    bytes_out: int = 0
    bytes_in: int = 0
    most_on_host: int = 0
    """Peak of bytes held on the host."""
    num_late: int = 0
    """Number of reads before the tensor was expected; computation waited for the copy."""
    num_held_up: int = 0
    """Number of times that computation had to wait for an unfinished copy to the host to get memory back."""
