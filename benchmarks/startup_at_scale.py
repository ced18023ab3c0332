"""The start of a run on 8, 64 and 512 ranks, in one process::

    python benchmarks/startup_at_scale.py            # one rank of each stage, two minutes on two cores
    python benchmarks/startup_at_scale.py --quick    # a smaller model, the first and the last stage

The other ranks do not exist: PyTorch's fake process group answers every collective at once, with the values of this
rank, and messages with whatever is in memory. So numbers of groups, messages and function calls are those of a real
rank, and values mean nothing. Seconds are those of this rank's own work, without any wait for another one.

The model is a GPT on 8 stages, on nodes of 8 ranks: ``8 = pp 8``, ``64 = pp 8 x sdp 4 x dp 2``, ``512 = pp 8 x sdp 8 x
dp 8``.

* ``groups``: process groups that the rank is in, beside the default one, which the launcher's door makes.
* ``made``: groups that it hears of: PyTorch has all ranks call for each group.
* ``connections``: ranks that gloo connects it with, for these groups.
* ``partners``: ranks that it exchanges messages with in groups that are larger than a replica.
* ``attach``, ``plan``, ``connect``, ``first step``, ``second step``: function calls and returns, in thousands, and
  seconds. ``first step`` includes neither ``plan`` nor ``connect``.

The last line is JSON: for each number of ranks the largest figure of all stages, and ``growth``, the largest growth of
function calls from 64 to 512 ranks, where ranks are 8 times as many.
"""

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes the backend known)

from benchmarks.workloads import GPT, EngineSteps
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import pending_messages
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine import parallelize
from smp_strategy.engine.decide import decide

STAGES = NODE = 8
SHARDS = {8: 1, 64: 4, 512: 8}


class Start(NamedTuple):
    """Figures of one rank."""

    groups: int
    made: int
    connections: int
    partners: int
    spent: dict[str, float]
    """For each phase."""


class Phases:
    """Cost of each phase, without that of phases inside of it.

    Args:
        clock: Returns how much has been spent so far.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.spent: Counter[str] = Counter()
        self._clock = clock

    @contextmanager
    def of(self, name: str, outer: str | None = None) -> Iterator[None]:
        """Context of a phase, inside of the phase ``outer``."""
        before = self._clock()
        yield
        spent = self._clock() - before
        self.spent[name] += spent
        if outer is not None:
            self.spent[outer] -= spent

    def around(self, function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        """``function`` as a phase."""

        def instead(*args: Any, **kwargs: Any) -> Any:
            with self.of(*names):
                return function(*args, **kwargs)

        return instead


def function_calls() -> Callable[[], float]:
    """Clock that counts thousands of calls and returns of functions of this thread from now on."""
    events = itertools.count()
    sys.setprofile(lambda *_: next(events))
    return lambda: next(events) / 1000


class GroupCounts:
    """Groups and partners of a rank."""

    def __init__(self, shape: MeshShape, rank: int) -> None:
        self.made, self.sizes, self.partners = 0, list[int](), set[int]()
        self._make = dist.distributed_c10d._new_group_with_tag
        self._world, self._rank, self._replica = shape.world_size, rank, shape.pp * shape.tp

    def make(self, ranks: Sequence[int] | None = None, *_: Any, **options: Any) -> Any:
        """Instead of the function of torch: gloo would wait for the ranks that do not exist."""
        members = range(self._world) if ranks is None else ranks
        self.made += 1
        self.sizes += [len(members)] * (self._rank in members)
        return self._make(ranks, **{**options, "backend": "fake"})

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which sends or receives a message."""

        def instead(tensor: torch.Tensor, rank: int, tag: int, group: dist.ProcessGroup) -> Any:
            if group.size() > self._replica:
                self.partners.add(dist.get_global_rank(group, rank))
            return function(tensor, rank, tag, group)

        return instead


def start(num_ranks: int, stage: int, *, counts: bool, is_small: bool = False) -> Start:
    """Start the rank of ``stage`` in the first of the replicas, and run two steps.

    Args:
        num_ranks: Number of ranks.
        stage: Stage of the rank that exists.
        counts: Whether function calls are counted; otherwise seconds are.
        is_small: Whether there is only one partition and one schedule to choose from.
    """
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    shape = MeshShape.of_world(num_ranks, pp=STAGES, dp_shard=SHARDS[num_ranks], node_size=NODE)
    rank = shape.rank_at(0, stage)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=num_ranks)
    groups = GroupCounts(shape, rank)
    model = GPT(vocabulary=64, separates_ends=False, length=8, width=48, num_blocks=STAGES if is_small else 2 * STAGES)
    # Ranks that do not exist share no memory.
    options: dict[str, Any] = {"stage_transport": "gloo", "smp_report": "quiet", "microbatches": 2 * STAGES}
    options |= {"sharded_data_parallel_degree": shape.dp_shard} | ({"pipeline": "1f1b"} if is_small else {})
    config = SMPConfig(pipeline_parallel_degree=STAGES, **options)
    module = model.model()
    optimizer = torch.optim.AdamW(module.parameters())
    phases = Phases(function_calls() if counts else perf_counter)
    with (
        mock.patch.object(dist.distributed_c10d, "_new_group_with_tag", groups.make),
        mock.patch.object(pending_messages, "send", groups.noting(pending_messages.send)),
        mock.patch.object(pending_messages, "receive", groups.noting(pending_messages.receive)),
        mock.patch.object(parallelize, "decide", phases.around(decide, "plan", "first step")),
        mock.patch.object(parallelize, "_connect", phases.around(parallelize._connect, "connect", "first step")),
    ):
        with phases.of("attach"):
            steps = EngineSteps(model, module, optimizer, model.batch(2 * STAGES), config)
        for name in ("first step", "second step"):
            with phases.of(name):
                steps.step()
    sys.setprofile(None)
    connections = sum(groups.sizes) - len(groups.sizes)
    return Start(len(groups.sizes), groups.made, connections, len(groups.partners), dict(phases.spent))


def alone(*args: Any, **options: Any) -> Start:
    """:func:`start` in a process of its own, which has no groups yet."""
    with get_context("fork").Pool(1) as process:
        return process.apply(start, args, options)


def largest(found: Sequence[Start]) -> Start:
    """The largest of each figure."""
    return Start(
        groups=max(each.groups for each in found),
        made=max(each.made for each in found),
        connections=max(each.connections for each in found),
        partners=max(each.partners for each in found),
        spent={phase: max(each.spent[phase] for each in found) for phase in found[0].spent},
    )


def main(arguments: Sequence[str]) -> None:
    """Print the figures."""
    is_small = "--quick" in arguments
    stages = (0, STAGES - 1) if is_small else range(STAGES)
    rows: dict[int, dict[str, Any]] = {}
    for num_ranks in SHARDS:
        found, timed = (
            largest([alone(num_ranks, stage, counts=counts, is_small=is_small) for stage in stages])
            for counts in (True, False)
        )
        calls, seconds = ({name: round(value, 2) for name, value in each.spent.items()} for each in (found, timed))
        rows[num_ranks] = {**found._asdict(), "spent": calls, "seconds": seconds}
        print(f"{num_ranks:4} ranks: {rows[num_ranks]}", flush=True)
    growth = max(rows[512]["spent"][phase] / rows[64]["spent"][phase] for phase in rows[64]["spent"])
    print(json.dumps({**rows, "growth": round(growth, 2)}))


if __name__ == "__main__":
    main(sys.argv[1:])
