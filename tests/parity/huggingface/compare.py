"""One optimizer step of one process against the same step on a pipeline."""

from dataclasses import dataclass

import torch
from torch import Tensor

from smp_strategy.config import SMPConfig
from smp_strategy.engine import Engine
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks

from .architecture import Architecture

__all__ = ["Comparison", "Tensors", "compare", "one_process"]

MICROBATCHES = 2

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """What came out."""

    num_units: int
    stages: tuple[int, ...]
    """Number of units on each stage."""
    difference: float
    """Largest difference of a gradient or weight, relative to the largest element of that tensor."""
    is_shared: bool
    """Whether a weight is held by several stages, so that sums of gradients are taken in another order."""


def one_process(architecture: Architecture) -> tuple[Tensors, Tensors]:
    """Gradients and weights after one step of a plain process that accumulates over the microbatches."""
    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts, sizes = split(architecture.batch(model.model.config), MICROBATCHES)
    for part, size in zip(parts, sizes, strict=True):
        (model.step(part) * (size / sum(sizes))).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return gradients, model.state_dict()


def one_rank(architecture: Architecture, pp: int) -> tuple[Tensors, Tensors, list[int], bool]:
    """The same on one rank of a pipeline: its gradients, all weights on rank 0, stages of the units, shared weights."""
    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=MICROBATCHES))
    engine.attach(model, [optimizer])
    batch = architecture.batch(model.model.config)
    result = engine.train_step(model.step, batch, loss_of=lambda loss: loss)
    optimizer.zero_grad()
    result.commit(torch.ones(()), reduce=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return gradients, engine.full_state_dict(), list(engine.partition.stage_of.values()), bool(engine._shared)


def compare(architecture: Architecture, pp: int = 2, timeout: float = 30.0) -> Comparison:
    """Run both and look for the largest difference."""
    gradients, weights = one_process(architecture)
    assert any(gradient.abs().sum() > 0 for gradient in gradients.values())
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    ranks = run_ranks(one_rank, pp, architecture, pp, timeout=timeout)
    merged: Tensors = {}
    for found, *_ in ranks:
        for name, gradient in found.items():
            assert name not in merged or torch.equal(merged[name], gradient), f"{name} differs between stages"
        merged.update(found)
    _, found_weights, stages, is_shared = ranks[0]
    difference = max(_difference(gradients, merged), _difference(weights, found_weights))
    counts = tuple(stages.count(stage) for stage in range(pp))
    return Comparison(len(stages), counts, difference, is_shared)


def _difference(expected: Tensors, found: Tensors) -> float:
    assert expected.keys() == found.keys(), sorted(expected.keys() ^ found.keys())
    return max(_relative(expected[name], found[name]) for name in expected)


def _relative(expected: Tensor, found: Tensor) -> float:
    if torch.equal(expected, found):
        return 0.0
    scale = expected.abs().max().item()
    error = (expected - found).abs().max().item()
    return error / scale if scale else float("inf")
