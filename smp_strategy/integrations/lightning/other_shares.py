"""A pass over data that was dealt out to so many ranks, gone on with by more or fewer of them.

Which samples a rank reads, in which order, depends on how many ranks share them. Samplers that deal out one order of
all samples (torch's DistributedSampler, which Lightning puts in) have read the first ``batches x batch size x ranks``
samples of it after so many batches, whoever has read which. So the others go on after as many of their own batches as
make up these samples::

    4 ranks, batches of 8        12 batches each: 384 samples
    2 ranks, batches of 16       12 batches each
    2 ranks, batches of 8        24 batches each
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["dealt_out_again", "go_on_after"]


def dealt_out_again(
    places: Sequence[Mapping[str, Any] | None], batch_sizes: Sequence[int | None], num_before: int, num_now: int
) -> tuple[list[dict[str, Any] | None], str | None]:
    """Places of passes for another number of ranks.

    Args:
        places: of one of the ranks before, a place for each loader; see
            :meth:`~smp_strategy.integrations.data.resumable_loader.Pass.place`.
        batch_sizes: that the loaders have now.
        num_before, num_now: ranks that share the samples.

    Returns:
        The places, ``None`` for a loader that begins anew, and what is not as it was, if anything.
    """
    found: list[dict[str, Any] | None] = []
    left_over, unknown = 0, 0
    for place, batch_size in zip(places, batch_sizes, strict=True):
        before = None if place is None else place.get("batch_size")
        if place is None or before is None or batch_size is None:
            found.append(None)
            unknown += 1
            continue
        samples = (place["num_given"] - place["num_unused"]) * before * num_before
        number, left = divmod(samples, batch_size * num_now)
        left_over += left
        own = {name: value for name, value in place.items() if name != "loader"}
        found.append({**own, "num_given": number, "num_unused": 0, "is_of_others": True})
    told = []
    if left_over:
        told.append(f"{left_over} samples are no whole batch of each rank now, and are read again")
    if unknown:
        told.append(f"{unknown} loaders, of which nobody knows how large their batches are, begin their epoch anew")
    return found, "; ".join(told) or None


def go_on_after(batches: Any, number: int) -> None:
    """Let Lightning's counter of the batches of this epoch say that there were so many."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, number)
