"""Dry run of a model for tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp_strategy.engine.dry_run import DryRun, DryRunInput, dry_run
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.units import choose_units

CPU = torch.device("cpu")


def survey(model: nn.Module, step: Callable[[Any], Any], microbatch: Any, num_stages: int = 4) -> DryRun:
    """The dry run of ``step``; calls of units reach them directly again afterwards."""
    units, calls = choose_units(model, num_stages), UnitCalls()
    calls.intercept(units, model)
    inputs = DryRunInput(module=model, units=units, calls=calls, shape_inference=ShapeInference(CPU), device=CPU)
    try:
        return dry_run(step, microbatch, lambda loss: loss, inputs)
    finally:
        calls.give_back()
