"""Measured costs on several ranks: shared work, equal numbers, no trace in what is trained."""

import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError
from smp_strategy.planning.profiling import profiler as sharing
from smp_strategy.testing import run_ranks
from tests.parity.models import Text, batch_for

MEASURED = {"trace_execution_times": True, "trace_memory_usage": True}


class Statistics(Text):
    """Batch statistics, dropout and a count of calls in its units."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(8)
            block.norm.num_calls = 0
            block.norm.register_forward_hook(self._count)

    @staticmethod
    def _count(norm: Any, args: Any, result: Any) -> None:
        norm.num_calls += 1


def engine_for(model: nn.Module, pp: int, reports: list[str] | None = None, **options: Any) -> Engine:
    engine = Engine(
        SMPConfig(**{"pipeline_parallel_degree": pp, "microbatches": 4, **options}),
        report=(lambda text: None) if reports is None else reports.append,
    )
    engine.attach(model)
    return engine


def train(pp: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], tuple[int, ...]]:
    torch.manual_seed(0)
    model = Statistics()
    engine = engine_for(model, pp, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        result = engine.train_step(model.loss, batch_for("text", step, 8), loss_of=lambda loss: loss)
        result.commit(torch.ones(()), reduce=True)
        losses.append(result.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = engine.saved.full_state_dict()
    engine.detach()
    return losses, state, tuple(block.norm.num_calls for block in model.blocks)


@pytest.mark.parametrize("options", [MEASURED, {"trace_memory_usage": True, "trace_device": "cpu"}], ids=str)
def test_training_is_bit_identical_with_and_without_measuring(options):
    plain, measured = run_ranks(train, 2, 2, {}), run_ranks(train, 2, 2, options)
    assert [losses for losses, *_ in measured] == [losses for losses, *_ in plain]
    # Measured costs may lead to another partition, so the calls of a block may have been made on another rank.
    calls = [[sum(each) for each in zip(*(calls for *_, calls in run), strict=True)] for run in (measured, plain)]
    assert calls[0] == calls[1]
    assert measured[0][1].keys() == plain[0][1].keys()
    assert all(torch.equal(tensor, plain[0][1][name]) for name, tensor in measured[0][1].items())


class Mixed(Text):
    """Blocks of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.mlp = nn.Sequential(*[nn.Linear(16, 16) for _ in range(1 + number % 3)])


def share(pp: int) -> tuple[list[str], Any, Any]:
    """What this rank has measured, what it knows of it, and its partition."""
    torch.manual_seed(0)
    mine: list[str] = []
    real = sharing.measure_alone

    def noting(call: Any, *args: Any, memory: bool, **options: Any) -> Any:
        if memory:  # otherwise it is the common call that ranks are compared by
            mine.append(call.kind)
        return real(call, *args, memory=memory, **options)

    sharing.measure_alone = noting
    model = Mixed()
    engine = engine_for(model, pp, **MEASURED)
    engine.train_step(model.loss, batch_for("text", 0, 8), loss_of=lambda loss: loss)
    measured = engine.layout.costs.measured
    return mine, (measured, engine.layout.costs.stage_speeds), engine.partition


@pytest.mark.parametrize(("ranks", "pp"), [(2, 2), (4, 2), (4, 4)])
def test_each_kind_of_unit_is_measured_on_one_rank_and_known_on_all(ranks, pp):
    found = run_ranks(share, ranks, pp)
    counts = Counter(kind for mine, *_ in found for kind in mine)
    assert len(counts) == 6  # embedding, three kinds of blocks, norm, head
    assert set(counts.values()) == {1}
    assert all(mine for mine, *_ in found)
    assert len({repr(known) for _, known, _ in found}) == 1
    assert len({repr(partition) for *_, partition in found}) == 1
    measured = found[0][1][0]
    assert measured.rank_of["blocks.0"] == measured.rank_of["blocks.3"]
    assert set(measured.work) == set(measured.saved_bytes) == set(found[0][2].stage_of)
    assert not measured.notes


class Sleepy(nn.Linear):
    """Slower on rank 1, which is the first of two stages."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.inner = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03 if os.environ["RANK"] == "1" else 0.01)
        return super().forward(x)


class OfSleepers(Text):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleepy() for _ in range(8))


def unequal(options: dict[str, Any]) -> tuple[tuple[float, ...], list[int], str]:
    torch.manual_seed(0)
    model, reports = OfSleepers(), list[str]()
    engine = engine_for(model, 2, reports, memory_weight=0.0, **options)
    engine.train_step(model.loss, batch_for("text", 0, 8), loss_of=lambda loss: loss)
    assert engine.partition is not None
    stages = [stage for name, stage in engine.partition.stage_of.items() if name.startswith("blocks")]
    return engine.layout.costs.stage_speeds, [stages.count(0), stages.count(1)], "\n".join(reports)


def test_a_slower_rank_is_noticed_and_gets_less_to_do():
    speeds, blocks, reports = run_ranks(unequal, 2, {"trace_execution_times": True})[0]
    assert speeds[1] == 1.0
    assert 0.2 < speeds[0] < 0.6
    assert blocks[0] < blocks[1]
    assert "Measured: times of 11 units" in reports
    assert "Relative speeds: stage 0 0." in reports


def test_speeds_that_are_given_count_and_nothing_is_compared():
    speeds, blocks, _ = run_ranks(unequal, 2, {"trace_execution_times": True, "stage_speeds": (3.0, 1.0)})[0]
    assert speeds == (3.0, 1.0)
    assert blocks[0] > blocks[1]


class Alone(Text):
    """Its last block needs what is around it only while the model runs."""

    class Needy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.around["scale"]

    def __init__(self) -> None:
        super().__init__()
        self.head = Alone.Needy(16, 32)
        self.head.around = {}  # type: ignore[attr-defined]

    def loss(self, batch: Any) -> Tensor:
        self.head.around["scale"] = 2.0  # type: ignore[operator, index]
        try:
            return super().loss(batch)
        finally:
            self.head.around.clear()  # type: ignore[operator, union-attr]


def run_alone() -> str:
    model, reports = Alone(), list[str]()
    # One microbatch: another one would find what this one has cleared.
    engine = engine_for(model, 2, reports, trace_execution_times=True, microbatches=1)
    engine.train_step(model.loss, batch_for("text", 0, 8), loss_of=lambda loss: loss)
    return "\n".join(reports)


def test_a_unit_that_cannot_run_alone_is_reported_by_name():
    assert "`head` is not measured but modelled: KeyError: 'scale'." in run_ranks(run_alone, 2)[0]


def run_without_gpu() -> str:
    with pytest.raises(ConfigError) as refusal:
        engine_for(Text(), 1, trace_execution_times=True, trace_device="gpu")
    return str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_before_anything_runs():
    assert (
        "`trace_device=gpu` asks for measurements on a GPU, but this rank has none" in run_ranks(run_without_gpu, 1)[0]
    )
