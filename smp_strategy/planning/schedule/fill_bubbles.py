"""Bubble filling: moves weight gradients into the idle times of a given schedule.

Only the optimizer waits for weight gradients. So forwards and input gradients keep their order, and whenever a stage
would wait for its next pass, it computes weight gradients that are due. The rest comes at the end (as in torch's
interleaved Zero Bubble).
"""

from collections import deque

from smp_strategy.planning.schedule.step_graph import Orders, ScheduledPass, StepGraph

__all__ = ["fill_waits"]


def fill_waits(graph: StepGraph, orders: Orders, *, impatience: float, num_whole: int = 0) -> list[list[ScheduledPass]]:
    """``orders`` with split backwards whose weight gradients fill the bubbles.

    Args:
        graph: Dependencies and costs of the passes.
        orders: Passes of each stage.
        impatience: Share of a weight gradient that may delay the next pass.
        num_whole: Number of first microbatches whose backwards stay whole.
    """
    given = [
        deque(entry for entry in graph.parted(order, num_whole=num_whole) if entry.kind != "W") for order in orders
    ]
    owed: list[deque[ScheduledPass]] = [deque() for _ in orders]
    filled: list[list[ScheduledPass]] = [[] for _ in orders]
    free_at = [0.0] * graph.num_stages
    ends: dict[tuple[int, int], float] = {}
    while any(given):
        moved = False
        for stage, passes in enumerate(given):
            while passes and (start := _start(graph, passes[0], ends)) is not None:
                entry = passes.popleft()
                while owed[stage]:
                    cost = graph.cost("W", owed[stage][0].segment)
                    if free_at[stage] + (1 - impatience) * cost > start:
                        break
                    filled[stage].append(owed[stage].popleft())
                    free_at[stage] += cost
                free_at[stage] = max(start, free_at[stage]) + graph.cost(entry.kind, entry.segment)
                ends[graph.track(entry.kind, entry.segment), entry.microbatch] = free_at[stage]
                filled[stage].append(entry)
                if entry.kind == "I":
                    owed[stage].append(entry._replace(kind="W"))
                moved = True
        assert moved, "the orders of a plan never wait for each other"
    return [[*order, *rest] for order, rest in zip(filled, owed, strict=True)]


def _start(graph: StepGraph, entry: ScheduledPass, ends: dict[tuple[int, int], float]) -> float | None:
    """Time at which all inputs of a pass have arrived; ``None`` while one is not produced yet."""
    start = 0.0
    for need, delay in graph.needs[graph.track(entry.kind, entry.segment)]:
        end = ends.get((need, entry.microbatch))
        if end is None:
            return None
        start = max(start, end + delay)
    return start
