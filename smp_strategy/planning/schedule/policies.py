"""Pipeline schedules by name, and the placement of chunks on stages that each of them needs.

* ``simple``: all forwards, then all backwards (GPipe, arXiv:1811.06965);
* ``interleaved``: backward work that is ready goes first, at most ``active_microbatches`` in flight (SageMaker);
* ``1f1b``: one forward, one backward (PipeDream-Flush, arXiv:2006.09503); with several chunks per stage, Megatron's
  interleaving (arXiv:2104.04473);
* ``zb-h1``, ``zb-h2``, ``zb-v``: Zero Bubble (arXiv:2401.10241): backward is split, and weight gradients fill the
  bubbles.

A *chunk* is a contiguous run of units. Chunks are placed on stages round robin (``loop``); under ``zb-v`` they go down
the stages and up again, so that the first and the last chunk share the last stage, which is rank 0, with losses and
loggers.
"""

from typing import Literal, NamedTuple

__all__ = ["Policy", "PolicyName", "candidates"]

PolicyName = Literal["simple", "interleaved", "1f1b", "zb-h1", "zb-h2", "zb-v"]
# More chunks make smaller bubbles and more messages; beyond this the messages win.
MOST_CHUNKS = 4


class Policy(NamedTuple):
    """Schedule of a step with its number of chunks and its limit of microbatches in flight."""

    name: PolicyName = "interleaved"
    num_chunks: int = 1
    """Chunks per stage."""
    active_microbatches: int | None = None
    """Most microbatches in flight on a stage; ``None``: as many as the policy needs (``interleaved``: stages + 2)."""

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients may be computed later than input gradients."""
        return self.name.startswith("zb-")

    def stage_of_chunk(self, chunk: int, num_stages: int) -> int:
        if self.name != "zb-v":
            return chunk % num_stages
        return num_stages - 1 - chunk if chunk < num_stages else chunk - num_stages

    def most_active(self, num_stages: int) -> int:
        """Limit of microbatches in flight under ``interleaved``; SageMaker's default if none is given."""
        return self.active_microbatches or num_stages + 2

    @property
    def layout(self) -> tuple[int, bool]:
        """Chunks per stage, and whether they form a V: equal for policies that can share a partition."""
        return self.num_chunks, self.name == "zb-v"

    def __str__(self) -> str:
        chunks = f", {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        active = f", {self.active_microbatches} in flight" if self.active_microbatches else ""
        return f"{self.name}{chunks}{active}"


def candidates(
    num_stages: int,
    num_microbatches: int,
    *,
    num_units: int,
    num_chunks: int | None = None,
    active_microbatches: int | None = None,
) -> list[Policy]:
    """Policies that ``auto`` chooses from, the simpler ones first.

    Args:
        num_stages: Number of stages.
        num_microbatches: Microbatches of the step.
        num_units: Number of units, an upper bound on the number of chunks.
        num_chunks: The only allowed number of chunks per stage; ``None``: any.
        active_microbatches: Most microbatches in flight on a stage; ``None``: as many as each policy needs.
    """
    found = [Policy("1f1b"), Policy("interleaved")]
    if num_stages > 1:
        # More microbatches in flight hide slow links.
        found += [
            Policy("interleaved", active_microbatches=active)
            for active in (2 * num_stages, 3 * num_stages)
            if Policy().most_active(num_stages) < active <= num_microbatches
        ]
        found += [Policy("1f1b", chunks) for chunks in range(2, MOST_CHUNKS + 1)]
        found += [Policy("zb-h1"), Policy("zb-h2"), Policy("zb-v", 2)]
    return [
        policy if active_microbatches is None else policy._replace(active_microbatches=active_microbatches)
        for policy in found
        if num_stages * policy.num_chunks <= num_units
        and num_chunks in (None, policy.num_chunks)
        and (active_microbatches is None or (policy.active_microbatches or 0) <= active_microbatches)
    ]
