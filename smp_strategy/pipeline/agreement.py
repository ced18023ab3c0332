"""Consistency check between the stages of a replica: all must have made the same calls in a step.

Each stage runs the user's whole program. If a rank has run other code than the others, results would not match. At the
end of each step the stages compare a digest of their calls; on a mismatch the error names the first call that differs.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.transport import Transport

__all__ = ["Agreement", "begin_to_agree"]

_END = "the end of a step or hook"


class Agreement(NamedTuple):
    """Comparison of programs that is under way."""

    is_reached: Callable[[], bool]
    """Returns whether the programs are already known to be the same."""
    check: Callable[[], None]
    """Waits, and raises :class:`UnsupportedError` with the first difference if they differ. Call it only at the end of
    a step, which the other stages reach as well."""


def begin_to_agree(transport: Transport, digest: int, path: Callable[[], Sequence[str]]) -> Agreement:
    """Begin to compare the programs that the stages have run; collective.

    Args:
        transport: transport among the stages.
        digest: digest of the calls of this stage.
        path: returns the names of these calls.
    """
    mine = torch.tensor([digest], device="cpu")
    found = [torch.full_like(mine, -1) for _ in transport.stage_ranks]
    compared = collectives.all_gather(found, mine, group=transport.group, doing=_END)

    def is_reached() -> bool:
        return compared.is_done() and all(torch.equal(mine, other) for other in found)

    def check() -> None:
        if is_reached():
            return
        compared.wait()
        if is_reached():
            return
        # A stage that has run something else may still be in its step, and wait for this one.
        told = (transport.rank, list(path()))
        raise UnsupportedError(
            _first_difference(dict(collectives.gather_objects(told, "a comparison of steps", transport.group)))
        )

    return Agreement(is_reached, check)


def _first_difference(paths: Mapping[int, Sequence[str]]) -> str:
    calls = zip_longest(*paths.values(), fillvalue="the end of the step")
    number, differing = next((n, call) for n, call in enumerate(calls) if len(set(call)) > 1)
    what = ", ".join(f"`{name}` on rank {rank}" for rank, name in sorted(zip(paths, differing, strict=True)))
    words = door_words()
    return (
        f"The ranks of this pipeline did not run the same code in this step: call {number} is {what}. A value that "
        f"only some ranks read (`{words.on_one}print(loss.item())`) or a branch on the rank is the usual "
        f"reason: do it on all ranks, or use {words.tell}."
    )
