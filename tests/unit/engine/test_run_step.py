"""Batches of a step: microbatches, jobs, and what users are told of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.run_step import cut, evaluation_job, training_job, warn_of_fewer
from smp_strategy.model.trace.shape_inference import ShapeInference


def parts_of(shape: MeshShape, **options: Any) -> tuple[EngineParts, list[str]]:
    """Parts of an engine on a mesh without processes, and what it has reported."""
    reports: list[str] = []
    parts = EngineParts(SMPConfig(**options), torch.device("cpu"), None, reports.append)
    mesh: Any = SimpleNamespace(shape=shape, pp=shape.pp, tp=shape.tp, dp=shape.dp, dp_rank=0)
    layout: Any = SimpleNamespace(
        group=TensorGroup(None), module=nn.Module(), shape_inference=ShapeInference(torch.device("cpu"))
    )
    parts.known_mesh, parts.known_layout = mesh, layout
    return parts, reports


def step(batch: Any) -> Any:
    return batch


def test_a_batch_is_cut_into_the_microbatches_that_the_options_ask_for():
    parts, _ = parts_of(MeshShape(pp=1, dp=1), microbatches=2)
    microbatches, sizes = cut(parts, torch.arange(6), "train", lambda: None)
    assert sizes == (3, 3)
    assert torch.equal(torch.cat(microbatches), torch.arange(6))


def test_a_batch_with_too_few_samples_is_told_of():
    with pytest.warns(UserWarning, match="`microbatches` is 4, but the batch has too few samples for that: 3 will be"):
        warn_of_fewer(SMPConfig(microbatches=4), 3)
    warn_of_fewer(SMPConfig(microbatches=4), 4)
    warn_of_fewer(SMPConfig(), 1)


def test_losses_are_weighted_by_samples():
    parts, _ = parts_of(MeshShape(pp=1, dp=1))
    assert training_job(parts, "train", step, [0, 1, 2], (2, 1, 1)).weights == [0.5, 0.25, 0.25]
    assert training_job(parts, "train", step, [0], (0,)).weights == [0.0]


def test_the_samples_of_a_step_are_counted_for_the_report():
    parts, reports = parts_of(MeshShape(pp=1, dp=2))
    training_job(parts, "train", step, [0, 1], (2, 2))
    assert parts.num_samples == 4
    assert not reports


def test_evaluation_has_seeds_of_its_own_and_does_not_change_those_of_training():
    evaluated, _ = parts_of(MeshShape(pp=1, dp=1))
    plain, _ = parts_of(MeshShape(pp=1, dp=1))
    evaluations = {evaluation_job(evaluated, "eval", step, [0], (1,)).seed for _ in range(2)}
    trainings = [training_job(evaluated, "train", step, [0], (1,)).seed for _ in range(2)]
    assert len({*evaluations, *trainings}) == 4
    assert trainings == [training_job(plain, "train", step, [0], (1,)).seed for _ in range(2)]
