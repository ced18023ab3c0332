"""Offline planning: a partition without ranks, on a laptop, for a model that is larger than its memory.

The model may be on the meta device. Units need no values (:mod:`smp_strategy.model.trace.shape_inference`); tensors
that code above them computes with (masks, rotary tables) are small and get memory, with zeros, during the dry run.

Layers that ranks would split are split temporarily, as on the first rank. Their choice depends on the step, too, which
is observed where that costs nothing: on the meta device, if the model is there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.activations.selection import choose
from smp_strategy.config.config import SMPConfig
from smp_strategy.config.keywords import OptionKeywords
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.engine.decide import fitting_partition, programs_of, relief_of
from smp_strategy.engine.dry_run import DryRun, DryRunInput, dry_run, run_for_real
from smp_strategy.engine.given_partition import choose_placed_units, num_parameters_of, place_beforehand
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.model.initial_values import zero_values
from smp_strategy.model.trace.device_model import Machine
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.units import Unit
from smp_strategy.planning.costs import Costs, find_costs
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.planner import PlanningInput
from smp_strategy.planning.profiling.recorded_calls import construction
from smp_strategy.precision.dtypes import halved
from smp_strategy.precision.mixed_precision import MixedPrecision
from smp_strategy.tensor_parallel.plan.observed_pairs import ObservedLayers
from smp_strategy.tensor_parallel.split import split_layers

__all__ = ["Survey", "plan_partition", "surveyed", "trace_program"]


def plan_partition(
    module: nn.Module,
    step: Callable[[Any], Any],
    microbatch: Any,
    *,
    num_stages: int,
    loss_of: Callable[[Any], Tensor | None] = lambda loss: loss,
    optimizers: Sequence[Optimizer] = (),
    machine: Machine | str = "cpu",
    **options: Unpack[OptionKeywords],
) -> Partition:
    """Partition that a run with ``num_stages`` stages would have: the best one, or a given one with its costs.

    A model of 30 billion parameters takes seconds and some megabytes::

        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        partition = plan_partition(
            model, lambda ids: model(ids, labels=ids).loss, torch.zeros(1, 2048, dtype=torch.int64), num_stages=8
        )

    Args:
        module: Full module, on the CPU or on the meta device.
        step: Called as ``step(microbatch)``, with the microbatch alone, whatever the training step of a run takes:
            ``lambda batch: module.training_step(batch, 0)`` for a LightningModule.
        microbatch: Example, as large as a microbatch of the run: the batch of a replica divided by ``microbatches``.
            Tensors on the meta device count as zeros. With `prescaled_batch=False` it has the samples of all ranks of a
            tensor-parallel group.
        num_stages: Number of pipeline stages.
        loss_of: Picks the loss out of the result of ``step``.
        optimizers: Optimizers of the module; without any, two moments per parameter are assumed.
        machine: Model of computation times: a nominal machine (``"cpu"``, ``"cuda"``) or one of your own.
        options: Options of the run, as for ``SMPStrategy``.

    Raises:
        ConfigError: the options do not go together, or there are fewer units than stages.
        UnsupportedError: the step reads values, and the module has none.
    """
    written: dict[str, Any] = {"pipeline_parallel_degree": num_stages, **options}
    config = SMPConfig.from_options(**written)
    config.check(num_stages)
    units = choose_placed_units(config, module, num_stages)
    given = place_beforehand(config, module, units, num_stages)
    shape = _shape(config, num_stages)
    with surveyed(
        config, module, step, microbatch, shape=shape, loss_of=loss_of, optimizers=optimizers, machine=machine
    ) as survey:
        found = fitting_partition(config, _programs(config, survey, shape), num_stages, given)
    return found.sized(num_parameters_of(units))


def trace_program(
    config: SMPConfig,
    module: nn.Module,
    step: Callable[[Any], Any],
    microbatch: Any,
    *,
    num_stages: int,
    loss_of: Callable[[Any], Tensor | None] = lambda loss: loss,
    optimizers: Sequence[Optimizer] = (),
    machine: Machine | str = "cpu",
) -> PlanningInput:
    """Planning problem: a microbatch of the module with its costs. Arguments as for :func:`plan_partition`."""
    shape = _shape(config, num_stages)
    with surveyed(
        config, module, step, microbatch, shape=shape, loss_of=loss_of, optimizers=optimizers, machine=machine
    ) as survey:
        return _programs(config, survey, shape)(config)


def _shape(config: SMPConfig, num_stages: int) -> MeshShape:
    dp_shard = config.sharded_data_parallel_degree
    return MeshShape(pp=num_stages, dp=dp_shard, dp_shard=dp_shard, tp=config.tensor_parallel_degree)


def _programs(config: SMPConfig, survey: "Survey", shape: MeshShape) -> Callable[[SMPConfig], PlanningInput]:
    limits = config.memory_limits(shape.pp) or (None,) * shape.pp
    return programs_of(survey.inputs, survey.found, survey.costs, shape, limits)


class Survey(NamedTuple):
    """A module with its layers split as on the first tensor-parallel rank, and a dry run of its step."""

    inputs: DryRunInput
    found: DryRun
    costs: Costs
    observed: ObservedLayers | None
    """Observations that decided which layers are split; ``None``: none are."""


@contextmanager
def surveyed(  # noqa: PLR0913  # those of plan_partition, and how it is traced
    config: SMPConfig,
    module: nn.Module,
    step: Callable[[Any], Any],
    microbatch: Any,
    *,
    shape: MeshShape,
    loss_of: Callable[[Any], Tensor | None] = lambda loss: loss,
    optimizers: Sequence[Optimizer] = (),
    machine: Machine | str = "cpu",
    shares: bool = False,
    before: ObservedLayers | None = None,
) -> Iterator[Survey]:
    """Context in which layers are split, with a dry run of the step. Arguments as for :func:`plan_partition`.

    Args:
        shape: Shape of the mesh.
        shares: Whether units that are built alike share a dry run.
        before: Observations of the step from an earlier split, for which it does not run again.
    """
    device = torch.device("cpu")
    units = choose_placed_units(config, module, shape.pp)
    calls = UnitCalls(MixedPrecision.asked_for(config, device.type))
    if calls.mixed_precision is not None:
        step = calls.mixed_precision.around_step(step)
    kind_of = (lambda unit: tuple(construction(unit))) if shares else None
    inputs = DryRunInput(
        module=module,
        units=units,
        calls=calls,
        shape_inference=ShapeInference(device, kind_of=kind_of),
        device=device,
        optimizers=optimizers,
    )
    microbatch = pytree.tree_map(_real, microbatch)
    precision = halved(module, torch.float16) if config.fp16_params else nullcontext()
    with precision, _split(config, inputs, step, microbatch, loss_of, before) as observed:
        calls.intercept(units, module)
        try:
            found = DryRun(None, ())
            if not config.skip_tracing:
                with _glue_in_memory(module, units, device):
                    found = dry_run(step, microbatch, loss_of, inputs)
            machine = Machine.nominal(machine) if isinstance(machine, str) else machine
            costs = find_costs(config, device, found.calls, found.trace, shape, machine)
        finally:
            calls.give_back()
        chosen = choose(config, module, units).units
        yield Survey(inputs, found, replace(costs, relief=relief_of(config, inputs, costs.machine, chosen)), observed)


@contextmanager
def _split(
    config: SMPConfig,
    inputs: DryRunInput,
    step: Callable[[Any], Any],
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None],
    observed: ObservedLayers | None = None,
) -> Iterator[ObservedLayers | None]:
    """Context in which layers are split as on the first tensor-parallel rank, with the observations they depend on."""
    if config.tensor_parallel_degree == 1:
        yield None
        return
    parameters = list(inputs.module.parameters())
    before = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
    split = split_layers(
        inputs.module,
        TensorGroup(None, rank=0, size=config.tensor_parallel_degree),
        patterns=config.tensor_parallel,
        strict=config.tensor_parallel_strict,
        stream_dim=config.stream_dim,
        run_step=None if observed is not None else lambda: _run(step, microbatch, loss_of, inputs),
        before=observed,
    )
    try:
        split.report.refuse_unsplit()
        yield split.watched
    finally:
        split.to_dense()
        for parameter, values, gradient in before:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient


def _run(
    step: Callable[[Any], Any], microbatch: Any, loss_of: Callable[[Any], Tensor | None], inputs: DryRunInput
) -> None:
    """Run the step for a caller that observes it."""
    module = inputs.module
    without_values = [each for each in (*module.parameters(), *module.buffers()) if each.is_meta]
    if without_values:
        # Free, as nothing is computed. A step that fails reads values, or has some on another device: zeros serve it.
        with suppress(Exception), torch.device("meta"), Snapshot(modules=module.modules()):
            step(pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), microbatch))
            return
    inputs.calls.intercept(inputs.units, inputs.module)
    try:
        with zero_values(without_values, inputs.device):
            run_for_real(step, microbatch, loss_of, inputs)
    finally:
        inputs.calls.give_back()


def _real(leaf: Any) -> Any:
    return torch.zeros_like(leaf, device="cpu") if isinstance(leaf, Tensor) and leaf.is_meta else leaf


@contextmanager
def _glue_in_memory(module: nn.Module, units: Sequence[Unit], device: torch.device) -> Iterator[None]:
    """Context in which parameters and buffers of the glue are on ``device``, zero if they have no values."""
    of_units = {id(tensor) for unit in units for tensor in unit.tensors}
    inside = {id(part) for unit in units for part in unit.module.modules()}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in module.modules():
        if id(part) in inside:
            continue
        registered: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in registered:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta and id(tensor) not in of_units:
                    before.append((tensors, name, tensor))
    for tensors, name, tensor in before:
        zeros = torch.zeros_like(tensor, device=device)
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors[name] = nn.Parameter(zeros, tensor.requires_grad) if is_parameter else zeros
    try:
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor
