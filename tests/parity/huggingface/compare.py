"""One optimizer step of one process against the same step on a pipeline.

Ranks that are forked for one architecture spend half of their time on what a process does once. So several
architectures may share them; each is still compared on ranks of its own where one of them fails or hangs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.model.units import choose_units
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

from .architecture import Architecture

__all__ = ["STAGES", "Comparison", "compare", "compare_together", "one_process", "one_rank"]

STAGES, MICROBATCHES = 2, 2
TOLERANCE = 1e-6

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """What came out."""

    stages: tuple[int, ...]
    """Number of units on each stage."""
    difference: float
    """Largest difference of a gradient or weight, relative to the largest element of that tensor, or to a thousandth of
    the largest of all, if that is more: some gradients are zero but for rounding."""
    surprising: tuple[str, ...]
    """Tensors that differ at all, although nothing is added in another order than in one process: their parameters are
    on one stage, not tied, and belong to a unit that runs once per microbatch."""

    @property
    def is_right(self) -> bool:
        """Whether a pipeline may be that far from one process."""
        return self.difference <= TOLERANCE and not self.surprising


def one_process(architecture: Architecture) -> tuple[Tensors, Tensors, set[str]]:
    """Gradients and weights after one step of a plain process that accumulates over the microbatches, and the names of
    tied parameters and of units that run more than once per microbatch."""
    model = architecture.build()
    once = {name for name, _ in model.named_parameters()}
    tied = [p for name, p in model.named_parameters(remove_duplicate=False) if name not in once]
    calls = Counter[str]()
    for unit in choose_units(model, STAGES):
        unit.module.register_forward_hook(lambda *_, name=unit.name: calls.update([name]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts, sizes = split(architecture.batch(model.model.config), MICROBATCHES)
    for part, size in zip(parts, sizes, strict=True):
        (model.step(part) * (size / sum(sizes))).backward()
    gradients = _gradients(model)
    optimizer.step()
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if any(p is other for other in tied)}
    return gradients, model.state_dict(), names | {name for name, number in calls.items() if number > MICROBATCHES}


def one_rank(architecture: Architecture, stages: int) -> tuple[Tensors, Tensors, list[int]]:
    """The same on one rank of a pipeline: its gradients, all weights on rank 0, and the stages of the units."""
    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The reference is a process that accumulates over the same microbatches, bit for bit.
    options = {"microbatches": MICROBATCHES, "loss_weighting": "samples", **architecture.strategy}
    engine = Engine(SMPConfig(pipeline_parallel_degree=stages, **options))
    engine.attach(model, [optimizer])
    result = engine.train_step(model.step, architecture.batch(model.model.config), loss_of=lambda loss: loss)
    optimizer.zero_grad()
    result.commit(torch.ones(()), reduce=True)
    gradients = _gradients(model)
    optimizer.step()
    assert engine.partition is not None
    found = gradients, engine.saved.full_state_dict(), list(engine.partition.stage_of.values())
    engine.close()
    return found


def several(architectures: Sequence[Architecture], stages: int) -> list[Any]:
    """:func:`one_rank` for each."""
    return [one_rank(architecture, stages) for architecture in architectures]


def compare(architecture: Architecture, timeout: float = 120.0) -> Comparison:
    """Run both and look for the largest difference."""
    return compare_together([architecture], timeout)[0]


def compare_together(architectures: Sequence[Architecture], timeout: float = 200.0) -> list[Comparison]:
    """The same for several, on the same ranks; raises what the first one that fails raises."""
    expected = [_expected(architecture, timeout) for architecture in architectures]
    ranks = run_ranks(several, STAGES, architectures, STAGES, timeout=timeout)
    together = zip(architectures, expected, *ranks, strict=True)
    return [_judge(architecture, wanted, found) for architecture, wanted, *found in together]


def _expected(architecture: Architecture, timeout: float) -> tuple[Tensors, Tensors, set[str]]:
    """What one process has; in this one, so that what it imports is there when ranks are forked."""
    gradients, weights, reused = one_process(architecture)
    if architecture.is_random:
        ((gradients, weights, _),) = run_ranks(one_rank, 1, architecture, 1, timeout=timeout)
    return gradients, weights, reused


def _judge(
    architecture: Architecture,
    expected: tuple[Tensors, Tensors, set[str]],
    ranks: list[tuple[Tensors, Tensors, list[int]]],
) -> Comparison:
    gradients, weights, reused = expected
    assert any(gradient.abs().sum() > 0 for gradient in gradients.values())
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    merged: Tensors = {}
    shared: set[str] = set()
    for found, *_ in ranks:
        shared |= merged.keys() & found.keys()
        assert all(torch.equal(merged[name], found[name]) for name in shared & found.keys()), "stages disagree"
        merged.update(found)
    _, found_weights, stages = ranks[0]
    differences = _differences(gradients, merged) | _differences(weights, found_weights)
    in_order = [name for name in differences if name not in shared and not _is_in(name, reused)]
    if not architecture.is_in_order:
        in_order = []
    return Comparison(
        tuple(stages.count(stage) for stage in range(STAGES)),
        max(differences.values(), default=0.0),
        tuple(in_order),
    )


def _gradients(model: nn.Module) -> Tensors:
    return {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def _differences(expected: Tensors, found: Tensors) -> dict[str, float]:
    """Relative differences of the tensors that are not equal."""
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    floor = max(tensor.abs().max().item() for tensor in expected.values() if tensor.numel()) / 1000
    return {
        name: (tensor - found[name]).abs().max().item() / max(tensor.abs().max().item(), floor)
        for name, tensor in expected.items()
        if not torch.equal(tensor, found[name])
    }


def _is_in(name: str, names: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{other}.") for other in names)
