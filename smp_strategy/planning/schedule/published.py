"""Published schedules as tables: 1F1B, interleaved 1F1B, ZB-H1, ZB-H2 and ZB-V.

A pass is ``(kind, chunk, microbatch)``, where ``chunk`` counts the chunks of the stage. The tables are made for stages
of equal cost; for others, :mod:`smp_strategy.planning.schedule.simulate` compares them with further orders.
"""

from typing import Literal, NamedTuple

__all__ = ["ChunkPass", "one_forward_one_backward", "zero_bubble", "zero_bubble_v"]


class ChunkPass(NamedTuple):
    """Pass of one chunk of a stage for one microbatch."""

    kind: Literal["F", "B", "I", "W"]
    chunk: int
    microbatch: int


def one_forward_one_backward(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1, *, most_live: int | None = None
) -> list[ChunkPass]:
    """1F1B (arXiv:2006.09503), and Megatron's interleaving for several chunks (arXiv:2104.04473, figure 4).

    With several chunks the microbatches go through them in groups of ``num_stages``; the last group may be smaller.

    Args:
        stage: Number of the stage.
        num_stages: Number of stages.
        num_microbatches: Microbatches of the step.
        num_chunks: Chunks per stage.
        most_live: Most chunks in flight on a stage.
    """
    chunks = range(num_chunks)
    groups = [
        range(first, min(first + num_stages, num_microbatches)) for first in range(0, num_microbatches, num_stages)
    ]
    forwards = [ChunkPass("F", chunk, number) for group in groups for chunk in chunks for number in group]
    backwards = [ChunkPass("B", chunk, number) for group in groups for chunk in reversed(chunks) for number in group]
    after = num_stages - stage - 1
    warm_up = after if num_chunks == 1 else 2 * after + (num_chunks - 1) * num_stages
    if most_live is not None:
        warm_up = min(warm_up, most_live - 1)
    warm_up = min(warm_up, len(forwards))
    table = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        table += [forward, backward]
    return table + backwards[len(forwards) - warm_up :]


def zero_bubble(warm_up: int, delay: int, num_microbatches: int) -> list[ChunkPass]:
    """ZB-H1 and ZB-H2 (arXiv:2401.10241, section 2, the handcrafted schedules) for one stage.

    Args:
        warm_up: Forwards before the first pair of forward and backward; p - s - 1 for stage s of p in ZB-H1 and
            2(p - s - 1) in ZB-H2.
        delay: Input gradients by which weight gradients lag behind; s in ZB-H1 and 2s in ZB-H2.
        num_microbatches: Microbatches of the step.
    """
    warm_up = min(warm_up, num_microbatches)
    table = [ChunkPass("F", 0, number) for number in range(warm_up)]
    for number in range(num_microbatches):
        if number + warm_up < num_microbatches:
            table.append(ChunkPass("F", 0, number + warm_up))
        table.append(ChunkPass("I", 0, number))
        if number >= delay:
            table.append(ChunkPass("W", 0, number - delay))
    return table + [ChunkPass("W", 0, number) for number in range(max(num_microbatches - delay, 0), num_microbatches)]


def zero_bubble_v(depth: int, num_stages: int, num_microbatches: int) -> list[ChunkPass]:
    """ZB-V (arXiv:2401.10241, section 6) for the stage whose chunks are number ``depth`` from the ends of the V.

    The schedule is defined for at least 2p - 1 microbatches; with fewer, passes of missing ones are left out.
    """
    count = max(2 * num_stages - 1, num_microbatches)
    after = num_stages - depth
    reached = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}
    table: list[ChunkPass] = []

    def do(chunk: int, kinds: str) -> None:
        for kind in kinds:
            table.append(ChunkPass(kind, chunk, reached[kind, chunk]))  # type: ignore[arg-type]
            reached[kind, chunk] += 1

    do(0, "F" * (2 * after - 1))
    for _ in range(depth):
        do(1, "F")
        do(0, "F")
    for _ in range(after):
        do(1, "FIW")
    while reached["F", 1] < reached["F", 0] or reached["F", 0] < count:
        if reached["F", 0] < count:
            do(0, "F")
        do(0, "IW")
        do(1, "FIW")
    for _ in range(depth):
        do(0, "I")
        do(1, "I")
    for _ in range(after):
        do(0, "IW")
    for chunk in (1, 0):
        do(chunk, "W" * (count - reached["W", chunk]))
    return [entry for entry in table if entry.microbatch < num_microbatches]
