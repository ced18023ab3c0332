"""What a microbatch leaves, the next one finds, as in one process: sums, means, counts, lists, buffers."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

from .compare import REUSED, WIDTH, Blocks, Case, check, mean_square, refusal

GENERATOR = torch.Generator()
ENDLESS = itertools.cycle([0.1])
TOTAL = 0.0
NAMED = {"sum": 0.0}
METER = SimpleNamespace(sum=0.0, count=0)
CHUNKS = {"pipeline": "1f1b", "virtual_pipeline_degree": 2}


class Net(Blocks):
    """Four blocks, and places where a step may leave something."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        global TOTAL, ENDLESS
        super().__init__(step)
        self.level, self.count = 0.5, 0
        self.history: list[float] = []
        self.array = np.zeros(2)
        notes: list[int] = []
        self.note = lambda number: notes.append(number)
        self.num_notes = lambda: len(notes)
        notes: list[int] = []
        self.note = lambda number: notes.append(number)
        self.num_notes = lambda: len(notes)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.factors = iter([0.1 * number for number in range(1, 90)])
        self.generator = np.random.default_rng(0)
        GENERATOR.manual_seed(0)
        ENDLESS = itertools.cycle([0.1, 0.2, 0.3])
        TOTAL = NAMED["sum"] = METER.sum = 0.0
        METER.count = Blocks.calls = 0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def get_extra_state(self) -> Any:
        around = [self.num_notes(), TOTAL, NAMED["sum"], METER.sum, METER.count, Blocks.calls]
        return torch.tensor([self.level, self.count, *around, *self.array, *self.history], dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        pass


def running_sum(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x))
    net.level += loss.item()
    return loss


def running_sum_of_a_global(net: Any, x: Tensor) -> Tensor:
    global TOTAL
    loss = mean_square(net.body(x))
    TOTAL += loss.item()
    return loss


def running_sum_in_a_dict(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x))
    NAMED["sum"] += float(loss.detach())
    return loss


def running_sums_in_an_object(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x))
    METER.sum += loss.item() * len(x)
    METER.count += len(x)
    return loss


def running_sums_in_an_array(net: Any, x: Tensor) -> Tensor:
    y = net.body(x)
    net.array[0] += y.abs().max().item()
    net.array[1] = max(net.array[1], y.abs().max().item())
    return mean_square(y)


def running_mean(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x))
    net.level = 0.9 * net.level + 0.1 * loss.item()
    return loss / net.level


def list_made_anew(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x))
    net.history = [*net.history, loss.item()]
    return loss


def mean_in_two_operations(net: Any, x: Tensor) -> Tensor:
    y = net.body(x)
    net.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return mean_square(y - net.mean)


def mean_made_anew(net: Any, x: Tensor) -> Tensor:
    y = net.body(x)
    net.mean = 0.9 * net.mean + 0.1 * y.detach().mean(0)
    return mean_square(y - net.mean)


def centered_by_what_came_before(net: Any, x: Tensor) -> Tensor:
    y = net.body(x - net.mean)
    net.mean.lerp_(y.detach().mean(0), 0.1)
    return mean_square(y)


def scaled_by_the_last_loss(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x * net.level))
    net.level = 0.5 + 0.1 * loss.item()
    return loss


def scaled_in_the_midst(net: Any, x: Tensor) -> Tensor:
    y = net.body(net.body(x) * net.level)
    net.level += y.detach().mean().item()
    return mean_square(y)


def another_way_every_other_time(net: Any, x: Tensor) -> Tensor:
    y = net.body(x)
    y = net.body(y) if net.count % 2 else y + net.blocks[0](y)
    net.count += 1
    return mean_square(y)


def warmed_up(net: Any, x: Tensor) -> Tensor:
    y = net.body(net.body(x) * min(1.0, 0.1 * net.count))
    net.count += 1
    return mean_square(y)


def by_what_was_noted(net: Any, x: Tensor) -> Tensor:
    y = net.body(x)
    if len(net.history) > 1:
        y = y * min(1.0, sum(net.history) / len(net.history))
    y = net.blocks[0](y)
    loss = mean_square(y)
    net.history.append(loss.item())
    return loss


def counts_everywhere(net: Any, x: Tensor) -> Tensor:
    """The survey and the rehearsals leave nothing behind."""
    METER.count += len(x)
    Blocks.calls += 1
    net.array += 1
    net.note(len(x))
    net.count += 1
    return mean_square(net.body(x))


def draws_of_its_own(net: Any, x: Tensor) -> Tensor:
    """From generators and iterators that are the user's, which no survey has moved on."""
    factor = next(net.factors) + net.generator.random() + float(torch.rand((), generator=GENERATOR)) + next(ENDLESS)
    loss = mean_square(net.body(x * factor)) * next(net.factors)
    net.history.append(factor)
    return loss


STEPS = (
    *(running_sum, running_sum_of_a_global, running_sum_in_a_dict, running_sums_in_an_object, running_sums_in_an_array),
    *(running_mean, list_made_anew, mean_in_two_operations, mean_made_anew, centered_by_what_came_before),
    *(scaled_by_the_last_loss, scaled_in_the_midst, another_way_every_other_time, warmed_up, by_what_was_noted),
    *(counts_everywhere, draws_of_its_own),
)


class WithStatistics(Net):
    def __init__(self) -> None:
        super().__init__(reference_with_statistics_of_now)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.5)) for _ in range(4))
        self.blocks = nn.ModuleList(layers)


def reference_with_statistics_of_now(net: Any, x: Tensor) -> Tensor:
    hidden = net.body(x)
    net.blocks.eval()
    with torch.no_grad():
        reference = net.body(hidden)
    net.blocks.train()
    return mean_square(hidden - reference)


@pytest.mark.parametrize("options", [{}, CHUNKS], ids=["stages", "chunks"])
def test_a_second_pass_in_evaluation_uses_the_statistics_of_its_microbatch(options):
    check(Case(WithStatistics, options=options), 2, (2,))


CASES = {step.__name__: Case(lambda step=step: Net(step), differs=REUSED) for step in STEPS}


@pytest.mark.parametrize("case", CASES)
def test_two_stages(case):
    check(CASES[case], 2, (4,))


@pytest.mark.parametrize("case", CASES)
def test_chunks(case):
    check(replace(CASES[case], options=CHUNKS), 2, (6,))


@pytest.mark.parametrize("case", CASES)
def test_four_stages(case):
    check(CASES[case], 4, (4,))


@pytest.mark.parametrize("pipeline", ["simple", "1f1b", "zb-h1"])
def test_schedules(pipeline):
    for case in ("running_sum", "mean_in_two_operations", "scaled_by_the_last_loss"):
        check(replace(CASES[case], options={"pipeline": pipeline}), 2, (4,))


def late_sum(net: Any, x: Tensor) -> Tensor:
    """In the second step, and no survey has seen it."""
    loss = mean_square(net.body(x))
    net.count += 1
    if net.count > 8:
        net.level += loss.item()
    return loss


@pytest.mark.parametrize(
    ("step", "options"), [(late_sum, {}), (running_sum, {"skip_tracing": True}), (running_mean, {"skip_tracing": True})]
)
def test_what_no_rehearsal_has_seen_is_refused(step, options):
    # Two microbatches may happen to run one after the other, which is right and not refused.
    message = refusal(Case(lambda: Net(step), options=options), microbatches=8)
    assert "The step changes `level`, and did not when it was surveyed" in message
    check(Case(lambda: Net(step), options={**options, "active_microbatches": 1}, differs=REUSED), 2, (8,))


def how_it_runs(step: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=4))
    module = Net(step)
    engine.attach(module, [torch.optim.SGD(module.parameters(), lr=0.1)])
    engine.train_step(module.loss, Net.batch(torch.Generator().manual_seed(0)), loss_of=lambda loss: loss)
    carried = engine.layout.plans.carried
    engine.close()
    return "in order" if carried else "freely"


def plain(net: Any, x: Tensor) -> Tensor:
    net.count += len(x)
    net.last = net.body(x)
    return mean_square(net.last)


def read_first(net: Any, x: Tensor) -> Tensor:
    loss = mean_square(net.body(x))
    value = loss.item()
    net.level += value
    return loss


def mean_in_one_operation(net: Any, x: Tensor) -> Tensor:
    y = net.body(x)
    net.mean.lerp_(y.detach().mean(0), 0.1)
    return mean_square(y - net.mean)


def until_a_number_is_small(net: Any, x: Tensor) -> Tensor:
    """With made-up values this never ends."""
    y = net.body(x)
    while y.abs().max().item() > 0.05:
        y = y * 0.5
    net.count += 1
    return mean_square(y)


def longer_until_all_are_small(net: Any, x: Tensor) -> Tensor:
    """As text is generated: each call gets more. And a running sum."""
    y, scale = net.body(x), 1.0
    while not (y[-len(x) :].abs() < 0.2).all():
        scale *= 0.6
        y = torch.cat([y, net.blocks[-1](y).tanh()[-len(x) :] * scale])
    loss = mean_square(y)
    net.level += loss.item()
    return loss * net.level


@pytest.mark.parametrize(
    ("step", "way"),
    [
        *((plain, "freely"), (read_first, "freely"), (mean_in_one_operation, "freely")),
        *((running_sum, "in order"), (running_mean, "in order"), (mean_in_two_operations, "in order")),
        *((longer_until_all_are_small, "in order"), (scaled_by_the_last_loss, "in order")),
        (another_way_every_other_time, "in order"),
    ],
)
def test_stages_overlap_unless_microbatches_hand_state_on(step, way):
    assert set(run_ranks(how_it_runs, 2, step)) == {way}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("step", [until_a_number_is_small, longer_until_all_are_small])
def test_a_loop_that_ends_when_a_value_says_so(step, pp):
    check(Case(lambda: Net(step), differs=REUSED), pp, (4,))
