"""Compare any module on several stages with one plain process that accumulates over the same microbatches.

A case is a module with two methods: ``loss(batch)`` is the user's step, ``batch(generator)`` makes its data. What is
compared after two optimizer steps: the losses of all microbatches on all ranks, the state dict (weights and buffers)
on rank 0, and, where the module has an attribute ``seen``, the Python values that its step put there, on all ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

__all__ = [
    "GLUE",
    "REUSED",
    "SAMPLES",
    "USES",
    "WIDTH",
    "Block",
    "Blocks",
    "Case",
    "Outcome",
    "check",
    "in_order",
    "mean_square",
    "one_process",
    "pipeline",
    "refusal",
    "steps_of",
]

WIDTH = 8
SAMPLES = 8
STEPS = 2
TOLERANCE = 1e-6

# Why weights may differ in their last bits; the first of these with several microbatches only.
REUSED = "a weight gets gradients on several stages or in several segments: their sums over the microbatches are added"
GLUE = "every stage has a part of the gradient of a weight that the glue computes with: the parts are added last"
USES = "a value or weight has three uses or more on several stages: each stage adds up its own uses first"


@dataclass(frozen=True)
class Case:
    """A module and how exactly its numbers are those of one process."""

    make: Callable[[], nn.Module]
    differs: str = ""
    """Empty: bit for bit; or the reason for comparing within 1e-6, :data:`GLUE` for instance."""
    draws: bool = False
    """It draws random numbers: what counts is one stage under the engine, not a plain process."""
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """Four blocks, and a step that is given: ``step(net, x)``."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.offset = nn.Parameter(torch.randn(WIDTH))
        self.step = step
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        return self.step(self, batch["x"])

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"x": torch.randn(SAMPLES, WIDTH, generator=generator)}


def steps_of(steps: Iterable[Callable[[Any, Tensor], Tensor]], **options: Any) -> dict[str, Case]:
    """A table of cases of :class:`Blocks`, by the names of their steps."""

    def case(step: Callable[[Any, Tensor], Tensor]) -> Case:
        return Case(lambda: Blocks(step), **options)

    return {step.__name__: case(step) for step in steps}


@dataclass
class Outcome:
    """What one rank has in the end."""

    losses: list[float]
    seen: list[Any]
    state: dict[str, Tensor]


def _start(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = case.make()
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return module, torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


def _batch(module: nn.Module, step: int) -> Any:
    return module.batch(torch.Generator().manual_seed(step))


def one_process(case: Case, microbatches: int) -> Outcome:
    """Train in this process, microbatch by microbatch."""
    module, optimizer = _start(case)
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        cut, sizes = split(_batch(module, step), microbatches)
        for part, size in zip(cut, sizes, strict=True):
            loss = module.loss(part)
            (loss * (size / sum(sizes))).backward()
            losses.append(loss.item())
        optimizer.step()
    return Outcome(losses, list(getattr(module, "seen", ())), module.state_dict())


def pipeline(case: Case, pp: int, counts: Iterable[int]) -> list[Outcome]:
    """Train on ``pp`` stages; once for each number of microbatches."""
    found = []
    for microbatches in counts:
        module, optimizer = _start(case)
        engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=microbatches, **case.options))
        engine.attach(module, [optimizer])
        losses = []
        for step in range(case.steps):
            result = engine.train_step(module.loss, _batch(module, step), loss_of=lambda loss: loss)
            optimizer.zero_grad()
            result.commit(torch.ones(()), reduce=True)
            optimizer.step()
            losses += [loss.item() for loss in result.outputs]
        found.append(Outcome(losses, list(getattr(module, "seen", ())), engine.saved.full_state_dict()))
        engine.close()
    return found


def check(
    case: Case,
    pp: int,
    counts: tuple[int, ...] = (1, 4),
    run: Callable[..., list[Outcome]] = pipeline,
    layout: Iterable[Any] = (),
) -> None:
    """``case`` has the same numbers on ``pp`` stages as in one process, for each number of microbatches.

    Args:
        case, pp, counts: see :func:`pipeline`.
        run: what the ranks do in its place.
        layout: what ``run`` gets besides.
    """
    expected = run_ranks(pipeline, 1, case, 1, counts)[0] if case.draws else [one_process(case, n) for n in counts]
    ranks = run_ranks(run, pp, case, pp, counts, *layout)
    for number, (count, wanted) in enumerate(zip(counts, expected, strict=True)):
        exact = not case.differs or (case.differs == REUSED and count == 1)
        _assert_same_state(wanted.state, ranks[0][number].state, exact)
        for found in (rank[number] for rank in ranks):
            assert found.losses == (wanted.losses if exact else pytest.approx(wanted.losses, rel=1e-5))
            # Microbatches take turns, so the order in which they note something down is not that of one process.
            assert sorted(map(repr, found.seen)) == sorted(map(repr, wanted.seen))


def _assert_same_state(expected: dict[str, Tensor], found: dict[str, Tensor], exact: bool) -> None:
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        if not isinstance(tensor, Tensor) or exact:
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            torch.testing.assert_close(found[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def refusal(case: Case, pp: int = 2, microbatches: int = 2) -> str:
    """The error that a rank meets first in training ``case``; fails if there is none."""
    with pytest.raises(RuntimeError) as caught:
        run_ranks(pipeline, pp, case, pp, (microbatches,))
    return str(caught.value)


def mean_square(x: Tensor) -> Tensor:
    """A loss for anything."""
    return F.mse_loss(x, torch.zeros_like(x))


def in_order(net: Any, x: Tensor) -> Tensor:
    """The plainest step of :class:`Blocks`."""
    for block in net.blocks:
        x = block(x)
    return mean_square(x)
