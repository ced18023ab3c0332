"""Training steps in a pipeline, beside those of ``torch.distributed.pipelining``, in one run::

    python benchmarks/pipeline.py            # 2 and 4 ranks, at most an hour and a half on two cores
    python benchmarks/pipeline.py --short    # the same with half as many tokens, so that passes take half as long
    python benchmarks/pipeline.py --quick    # 2 ranks, one round: does it run?

What is compared: training steps that follow each other, as they do in training, each with forward, backward and the
optimizer (SGD), from the moment in which all ranks begin to the moment in which the last of them has ended its last
step. Neither side makes ranks wait for each other in between, so a rank may begin a step while another still ends the
one before. Beside that, *alone*: one such step, with all ranks waiting for each other before and after it, as where
gradients are clipped by their norm. Both sides get the same weights, the same batch and the same microbatches, in the
same processes over the same gloo connections, and take turns, each going first every other time; what counts is the
median of the ratios of neighbours. Before anything is timed, the gradients of both are compared. Where stages compute,
times differ from turn to turn and from one start of the processes to the next, and our timetable depends on what was
measured: so both sides are built several times, in new processes, with more turns where the cut is given. Two kinds of
stages:

* *compute*: a GPT (hand-written, so that torch's stages need no tracing), on no more ranks than there are cores;
* *sleep*: each unit sleeps in its forward, for its input's gradient and for its weight's gradient, which are nodes of
  their own in autograd's graph, so that both sides can split backward. Sleeping needs no core: any number of ranks can
  be timed on two of them, and it is known how long a step should take. A pass of a stage takes as long as one of a
  large model on GPUs; what either side loses between passes does not depend on that. The three take 7 : 8 : 6, as the
  floating point operations of a transformer of width 4096 on 4096 tokens say (``sleepers.py``).

Two kinds of settings:

* The cut is given: the parts of the model are dealt out evenly to one chunk per stage, to two (``loop``), or to two
  that go down the stages and up again (``v``). Torch runs each of its schedules that work on this cut, and the one that
  is fastest in the first row of steps is compared (it is asked for no outputs, which it would concatenate); ours
  chooses by itself (``pipeline=auto``).
* ``auto``: units of unequal cost. Torch's 1F1B gets stages of equal counts, as its users cut; ours chooses the
  partition as well.

The last line is JSON: ``worst_ratio_vs_torch`` over the settings with a given cut, ``worst_alone_vs_torch``, the same
of steps alone, ``auto_ratio_vs_torch_1f1b`` (the worst one), ``sleep_efficiency`` (what our timetable should take over
what it takes, the worst of the given cuts at 4 ranks and 8 microbatches) and ``worst_over_optimum``: the sleeping steps
whose partition and timetable ours chooses, over the best of all contiguous cuts under all policies, which an exhaustive
simulation of as many steps finds.
"""

import copy
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, mode
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from sleepers import Sleepers
from timing import seconds_of
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.optim import SGD
from workloads import GPT, Batch, Chain, EngineSteps

from smp_strategy.config.config import SMPConfig
from smp_strategy.model.annotations import set_partition
from smp_strategy.model.trace.work import Link
from smp_strategy.pipeline.routing import SegmentId
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.policies import Policy, candidates
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import ScheduledPass, StepGraph
from smp_strategy.testing import run_ranks

CPU = torch.device("cpu")
LEARNING_RATE = 1e-3

# Settings


class Size(NamedTuple):
    """How long it all takes."""

    stage_seconds: float
    """Of the passes of a stage that sleeps, on average."""
    length: int
    """Of the samples of what computes."""
    rounds: int
    """Turns of both sides, each time that they are built."""
    compute_rounds: int
    """Those of steps in a row where stages compute and the cut is given, so that the difference is small."""
    constructions: int
    """How often both sides are built where stages compute."""
    steps: int
    """In a row."""
    width: int = 384
    """Of what computes."""
    vocabularies: tuple[int, int] = (1024, 16384)
    """Of what computes: where the cut is given, and where it is chosen."""


USUAL, QUICK = Size(0.2, 512, 3, 5, 3, 5), Size(0.01, 16, 1, 1, 1, 2, 48, (64, 1024))
# What either side does between passes weighs twice as much here.
SHORT = USUAL._replace(length=256, compute_rounds=7, constructions=4)


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared."""

    workload: GPT | Sleepers
    num_ranks: int
    num_microbatches: int
    schedules: tuple[type, ...]
    """Torch's."""
    placement: Policy = Policy()
    """Says where chunks go."""
    chooses_partition: bool = False
    """Ours does; torch has the same number of parts on each stage."""

    @property
    def sleeps(self) -> bool:
        return isinstance(self.workload, Sleepers)

    @property
    def name(self) -> str:
        kind = "sleep" if self.sleeps else "compute"
        chunks = "auto" if self.chooses_partition else "1 chunk"
        if self.placement.num_chunks > 1:
            chunks = f"2 chunks, {'v' if self.placement.name == 'zb-v' else 'loop'}"
        return f"{kind}, {self.num_ranks} ranks, {chunks}"

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Stage, first part and end of each chunk."""
        num_parts, num_chunks = len(self.workload.model().parts), self.placement.num_chunks * self.num_ranks
        starts = [chunk * num_parts // num_chunks for chunk in range(num_chunks + 1)]
        return [
            (self.placement.stage_of_chunk(chunk, self.num_ranks), begin, end)
            for chunk, (begin, end) in enumerate(itertools.pairwise(starts))
        ]

    def place(self, model: nn.Module) -> None:
        """Set the stage of each part of ``model``, unless it is to be chosen."""
        if not self.chooses_partition:
            for stage, begin, end in self.spans:
                for part in model.parts[begin:end]:
                    set_partition(part, stage)


# The cuts with the schedules of torch that work on them.
CUTS: Sequence[tuple[Policy, tuple[type, ...]]] = (
    (Policy("1f1b"), (Schedule1F1B, ScheduleInterleavedZeroBubble)),
    (Policy("1f1b", 2), (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)),
    (Policy("zb-v", 2), (ScheduleZBVZeroBubble,)),
)
# Seconds of units that sleep and are unequal, where a stage of equal ones takes one.
UNEVEN = (0.12, 0.24, 0.36, 0.12, 0.48, 0.24, 0.12, 0.6)


def settings(num_ranks: int, size: Size = USUAL) -> Iterator[Setting]:
    """Everything that is compared on ``num_ranks`` ranks."""
    uneven = tuple(share * size.stage_seconds for share in UNEVEN)
    for sleeps, num_microbatches in ((False, 4), (True, 2 * num_ranks)):
        for placement, schedules in CUTS:
            units = (size.stage_seconds / placement.num_chunks,) * (num_ranks * placement.num_chunks)
            vocabulary = size.vocabularies[0]
            gpt = GPT(vocabulary, separates_ends=False, length=size.length, width=size.width)
            yield Setting(
                workload=Sleepers(units) if sleeps else gpt,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                schedules=schedules,
                placement=placement,
            )
    for workload, num_microbatches in (
        (GPT(size.vocabularies[1], separates_ends=True, length=size.length, width=size.width), 4),
        (Sleepers(uneven), 2 * num_ranks),
    ):
        yield Setting(
            workload=workload,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            schedules=(Schedule1F1B,),
            chooses_partition=True,
        )


# The two sides


def ours(setting: Setting, model: Chain, batch: Batch) -> EngineSteps:
    """An engine that trains the model."""
    setting.place(model)
    config = SMPConfig(
        pipeline_parallel_degree=setting.num_ranks,
        microbatches=setting.num_microbatches,
        pipeline="auto",
        virtual_pipeline_degree=None if setting.chooses_partition else setting.placement.num_chunks,
        auto_partition=setting.chooses_partition,
        memory_weight=0.0,
        trace_execution_times=True,
    )
    return EngineSteps(setting.workload, model, SGD(model.parameters(), LEARNING_RATE), batch, config)


class Theirs:
    """One of torch's schedules with the stages of this rank."""

    def __init__(self, setting: Setting, schedule: type, model: Chain, batch: Batch) -> None:
        rank, num_chunks = dist.get_rank(), len(setting.spans)
        self.model, (x, target) = model, batch
        # Torch's stages are our chunks. Round and round they begin on its rank 0 and on our stage 0, and a V begins on
        # rank 0 on both sides, which is the last stage of ours.
        folds = setting.placement.name == "zb-v"
        self.spans = [
            (setting.num_ranks - 1 - stage if folds else stage, begin, end) for stage, begin, end in setting.spans
        ]
        stages = [
            PipelineStage(nn.Sequential(*model.parts[begin:end]), chunk, num_chunks, CPU)
            for chunk, (where, begin, end) in enumerate(self.spans)
            if where == rank
        ]
        is_single = schedule is Schedule1F1B
        self._schedule = schedule(stages[0] if is_single else stages, setting.num_microbatches, setting.workload.loss)
        self._optimizer = SGD([each for stage in stages for each in stage.submod.parameters()], LEARNING_RATE)
        self._args = (x,) if any(stage.is_first for stage in stages) else ()
        self._options = {"target": target, "losses": []} if any(stage.is_last for stage in stages) else {}

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._schedule.step(*self._args, **self._options, return_outputs=False)
        self._optimizer.step()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Of all parameters, on all ranks."""
        for where, begin, end in self.spans:
            for number in range(begin, end):
                for name, parameter in self.model.parts[number].named_parameters(f"parts.{number}"):
                    gradient = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                    dist.broadcast(gradient, where)
                    yield name, gradient


# Measuring


class Found(NamedTuple):
    """What was found with two sides."""

    rows: list[tuple[float, float]]
    """Seconds of a step in a row of them, ours and theirs, of each round."""
    alone: list[tuple[float, float]]
    """Those of steps that are alone."""
    best: str
    """Name of torch's fastest schedule."""
    chosen: str
    """Ours."""
    ideal: float | None
    """Seconds that a step in a row should take by our timetable, if that is known."""


class Row(NamedTuple):
    """What was found in a setting, all in all."""

    setting: Setting
    ours: float
    """Seconds of a step in a row of them."""
    theirs: float
    best: str
    chosen: str
    ratio: float
    alone: float
    """The ratio of steps that are alone."""
    ideal: float | None


def compare(setting: Setting, size: Size) -> Row:
    """Build both sides and measure, as often as is needed."""
    found = [
        run_ranks(measure, setting.num_ranks, setting, size, number, timeout=600)[0]
        for number in range(1 if setting.sleeps else size.constructions)
    ]
    rows = [row for each in found for row in each.rows]
    return Row(
        setting=setting,
        ours=median(mine for mine, _ in rows),
        theirs=median(theirs for _, theirs in rows),
        best=mode(each.best for each in found),
        chosen=mode(each.chosen for each in found),
        ratio=median(mine / theirs for mine, theirs in rows),
        alone=median(mine / theirs for each in found for mine, theirs in each.alone),
        ideal=found[0].ideal,
    )


def measure(setting: Setting, size: Size, construction: int) -> Found:
    """Build ours and torch's and compare them, for the so many-th time; on every rank."""
    steps = size.steps
    torch.manual_seed(0)
    model, batch = setting.workload.model(), setting.workload.batch(setting.num_microbatches)
    # Both sides get copies, so that memory is laid out alike for them.
    others = [Theirs(setting, kind, copy.deepcopy(model), batch) for kind in setting.schedules]
    model = copy.deepcopy(model)
    mine = ours(setting, model, batch)
    for side in (mine, *others):
        side.step()
    for theirs in others:
        check(model, theirs)
    mine.step()  # after its timetable
    first = [seconds(theirs, steps) for theirs in others]
    best = min(range(len(others)), key=first.__getitem__)
    is_close = not (setting.sleeps or setting.chooses_partition)
    rows, alone = (
        [turn(mine, others[best], construction + number, num_steps) for number in range(rounds)]
        for num_steps, rounds in ((steps, size.compute_rounds if is_close else size.rounds), (1, size.rounds))
    )
    explanation = mine.engine.inspection.explain()
    mine.engine.close()
    partition = explanation.partition
    return Found(
        rows=rows,
        alone=alone,
        best=setting.schedules[best].__name__.removeprefix("Schedule"),
        chosen=f"{partition.schedule}, {partition.chunks_per_stage} per stage",
        ideal=ideal(setting, partition.stage_of, explanation.plan, steps),
    )


def turn(mine: EngineSteps, theirs: Theirs, number: int, steps: int) -> tuple[float, float]:
    """Seconds of both; who goes first depends on the number of the turn."""
    times = [seconds(side, steps) for side in ((mine, theirs) if number % 2 else (theirs, mine))]
    mine_first, theirs_first = (times[0], times[1]), (times[1], times[0])
    return mine_first if number % 2 else theirs_first


def seconds(side: EngineSteps | Theirs, steps: int) -> float:
    """How long one of so many steps in a row takes."""
    return seconds_of(lambda: [side.step() for _ in range(steps)]) / steps


def check(model: Chain, theirs: Theirs) -> None:
    """A benchmark of wrong numbers is worth nothing: both sides have the same gradients."""
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in theirs.gradients():
        if mine[name] is not None:
            torch.testing.assert_close(mine[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


# What should be


def ideal(setting: Setting, stage_of: Mapping[str, int], plan: Plan, steps: int) -> float | None:
    """What the timetable would take per step in a row if all but sleeping was for free."""
    if not isinstance(setting.workload, Sleepers):
        return None
    flow = setting.workload.flow(stage_of, setting.num_ranks)
    graph = StepGraph(flow, setting.num_microbatches, Link.instant(), 0.0)
    orders = [
        [
            ScheduledPass(action.kind, graph.segments.index(SegmentId(stage, action.segment)), action.microbatch)
            for action in do
        ]
        for stage, do in enumerate(plan.stages)
    ]
    return graph.follow_in_a_row(orders, steps).end / steps


def optimum(setting: Setting, steps: int) -> float:
    """The least that a step in a row takes of all contiguous cuts under all policies."""
    workload = setting.workload
    assert isinstance(workload, Sleepers)
    num_units, stages = len(workload.seconds), setting.num_ranks
    best = float("inf")
    for policy in candidates(stages, setting.num_microbatches, num_units=num_units):
        for inner in itertools.combinations(range(1, num_units), policy.num_chunks * stages - 1):
            chunks = itertools.pairwise((0, *inner, num_units))
            stage_of = {
                f"parts.{unit}": policy.stage_of_chunk(chunk, stages)
                for chunk, span in enumerate(chunks)
                for unit in range(*span)
            }
            plan = simulate(workload.flow(stage_of, stages), setting.num_microbatches, policy, split_overhead=0.0)
            best = min(best, ideal(setting, stage_of, plan, steps) or best)
    return best


# Showing


def show(row: Row) -> None:
    """One line of the table."""
    efficiency = "" if row.ideal is None else f"{row.ideal / row.ours:8.1%}"
    print(
        f"{row.setting.name:32} {row.ours * 1e3:8.1f} {row.theirs * 1e3:8.1f} {row.ratio:7.3f} {row.alone:7.3f}"
        f" {efficiency:>8}"
        f"  {row.chosen:22} {row.best}",
        flush=True,
    )


def figures(rows: Sequence[Row], steps: int) -> dict[str, float]:
    """The last line."""
    given = [row for row in rows if not row.setting.chooses_partition]
    auto = [row for row in rows if row.setting.chooses_partition]
    most = max(row.setting.num_ranks for row in rows)
    efficiencies = [row.ideal / row.ours for row in given if row.ideal is not None and row.setting.num_ranks == most]
    over = [row.ours / optimum(row.setting, steps) for row in auto if row.ideal is not None]
    found = {
        "worst_ratio_vs_torch": max(row.ratio for row in given),
        "worst_alone_vs_torch": max(row.alone for row in given),
        "auto_ratio_vs_torch_1f1b": max(row.ratio for row in auto),
        "sleep_efficiency": min(efficiencies),
        "worst_over_optimum": max(over),
    }
    return {name: round(value, 4) for name, value in found.items()}


def has_cores(setting: Setting) -> bool:
    """Whether every rank that computes has a core of its own: ranks that share one only take turns."""
    return setting.sleeps or setting.num_ranks <= len(os.sched_getaffinity(0))


def main(arguments: Sequence[str]) -> None:
    """Run it for 2 and 4 ranks."""
    is_quick = "--quick" in arguments
    size = QUICK if is_quick else SHORT if "--short" in arguments else USUAL
    torch.set_num_threads(1)  # also those of the processes to come
    print(f"{'':32} {'ours ms':>8} {'torch':>8} {'ratio':>7} {'alone':>7} {'of ideal':>8}  {'ours':22} torch")
    rows = []
    for num_ranks in (2,) if is_quick else (2, 4):
        for setting in filter(has_cores, settings(num_ranks, size)):
            rows.append(compare(setting, size))
            show(rows[-1])
    print(json.dumps(figures(rows, size.steps)))


if __name__ == "__main__":
    main(sys.argv[1:])
