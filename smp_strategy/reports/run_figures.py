"""Figures of a run: speed, arithmetic, memory and waiting since the last time, from what each rank has counted."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["IN_PROGRESS_BAR", "RankFigures", "combine"]

# Figures of a progress bar, which has room for few.
IN_PROGRESS_BAR = ("smp/tokens_per_second", "smp/mfu", "smp/bubble", "smp/memory_gib")
_GIB = 2.0**30


class RankFigures(NamedTuple):
    """Counts of a rank since the last time."""

    counts: bool = True
    """Whether this rank counts the samples of its replica: its last stage does, once per tensor-parallel group."""
    seconds: float = 0.0
    """Time of training; evaluation is left out."""
    steps: int = 0
    """Training steps; each batch of an accumulation window is one."""
    samples: int = 0
    tokens: int | None = None
    """``None``: the batches have no tokens."""
    flops: float = 0.0
    """Floating-point operations of the model for these samples, without recomputation."""
    pass_seconds: float = 0.0
    """Time of forward and backward of the steps that ran under a schedule."""
    idle_seconds: float = 0.0
    """Part of it in which the stage waited for other stages, up to their agreement at the end of the step."""
    message_seconds: float = 0.0
    """Part of it in which the stage waited for messages."""
    gather_seconds: float = 0.0
    """Time in which the host waited for gathered weights."""
    memory: int = 0
    """Bytes in use."""
    predicted: int = 0
    """Predicted bytes of the same kinds of memory."""


def combine(ranks: Sequence[RankFigures], peak_flops: float | None = None) -> dict[str, float]:
    """Figures of a run by name; one that cannot be told is left out.

    Args:
        ranks: Counts of all ranks.
        peak_flops: Dense 16-bit FLOP/s of a device by its data sheet, for MFU; ``None``: unknown.
    """
    seconds, steps = max(rank.seconds for rank in ranks), max(rank.steps for rank in ranks)
    if not steps or seconds <= 0.0:
        return {}
    counting = [rank for rank in ranks if rank.counts]
    found = {
        "smp/step_seconds": seconds / steps,
        "smp/samples_per_second": sum(rank.samples for rank in counting) / seconds,
    }
    tokens = [rank.tokens for rank in counting]
    if None not in tokens:
        found["smp/tokens_per_second"] = sum(each or 0 for each in tokens) / seconds
    if flops := sum(rank.flops for rank in counting) / len(ranks) / seconds:
        found["smp/tflops_per_device"] = flops / 1e12
        if peak_flops is not None:
            found["smp/mfu"] = flops / peak_flops
    if passes := sum(rank.pass_seconds for rank in ranks):
        found["smp/bubble"] = sum(rank.idle_seconds for rank in ranks) / passes
        found["smp/message_wait_seconds"] = sum(rank.message_seconds for rank in ranks) / len(ranks) / steps
    if waited := sum(rank.gather_seconds for rank in ranks):
        found["smp/gather_wait_seconds"] = waited / len(ranks) / steps
    fullest = max(ranks, key=lambda rank: rank.memory)
    found["smp/memory_gib"] = fullest.memory / _GIB
    if fullest.predicted:
        found["smp/memory_predicted_gib"] = fullest.predicted / _GIB
    return found
