"""Parallelization: an ordinary module becomes the local model of each rank, in the first step and for all later runs.

[Note: order of parallelization] A trace needs a batch, so nothing is decided before there is one. Then:

1. tensors without values are checked: all must be able to get some;
2. layers are split, because the partition must know the sizes of their parts;
3. the partition is decided (:mod:`smp_strategy.engine.decide`);
4. every rank frees the values of other ranks (:mod:`smp_strategy.engine.local_model`);
5. calls of units go to the runtime of this rank's stage.

From then on a rank has a smaller model. With tensor parallelism there is one such model per part, each with its own
pipeline and all with the same partition; they meet in split layers only.

The decisions are in :class:`~smp_strategy.engine.layout.Layout` and last. The local model is made again for each run,
except for a module that was built on the meta device: it stays as the last run has left it.
"""

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from smp_strategy.activations.offload import Offload
from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.config.config import option_types
from smp_strategy.config.variables import note_on_others
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.common_settings import described
from smp_strategy.distributed.agreement.topics import SETTINGS
from smp_strategy.distributed.host_copies import HostCopies
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.engine.commands.layout_planning import estimates_on_ranks
from smp_strategy.engine.decide import agree_on, chosen_for_memory, decide
from smp_strategy.engine.dry_run import DryRun, dry_run, run_for_real
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.figures.startup_report import render_layout
from smp_strategy.engine.layout import Layout
from smp_strategy.engine.local_model import LocalModel
from smp_strategy.engine.new_step_kinds import FirstStep, refuse_new_hooks, refuse_rewritten
from smp_strategy.engine.plan_cache import PlanCache
from smp_strategy.errors import SMPError
from smp_strategy.model.ownership import Ownership
from smp_strategy.model.shard_layout import Cut
from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.places import reached_by_hooks
from smp_strategy.pipeline.dist_calls.user_collectives import replicas_of
from smp_strategy.pipeline.repeated_uses import widening_backward
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.shared_tensors.glue_parameters import NewUseError
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.transport.open_channels import measure_paths, open_channels, render_paths
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.planning.layouts.cluster import JobLayout
from smp_strategy.reports.layout_plan import chosen_text
from smp_strategy.tensor_parallel.plan.user_choices import heads_explained
from smp_strategy.tensor_parallel.split import split_layers
from smp_strategy.tensor_parallel.split_module import SplitModule

__all__ = ["make_whole_again", "parallelize", "resume"]


def parallelize(parts: EngineParts, first: FirstStep, copies: Sequence[nn.Module] = ()) -> LocalModel:
    """Make the local model of this rank, and the runtime that executes its stage. Collective over all ranks.

    Afterwards the module has the values of this rank only, and ``parts.calls`` answers calls of units with the runtime.
    See [Note: order of parallelization].

    Args:
        parts: Parts of the engine, with a full module. Gets the local model and the runtime.
        first: First step of the run. Its first microbatch is traced, if there is no partition yet.
        copies: Module copies of callbacks (EMA weights), which are partitioned together with the module.

    Raises:
        ConfigError: the model does not fit the degrees or the memory limits, or an optimizer cannot update parts.
        UnsupportedError: the step uses tensors in a way that a rank with some of them cannot follow.
        SMPError: layers would be split otherwise than in the last run.
    """
    layout, mesh = parts.layout, parts.mesh
    parts.ledger.note(SETTINGS, described(parts.optimizers)).compare("the first step")
    parts.delayed.prepare(layout.units, parts.optimizers)
    if layout.group.size > 1:
        _split_layers(parts, first, layout.group)
    is_first = layout.partition is None
    if is_first:
        _decide_partition(parts, first)
    if copies:
        parts.pending.give_whole(parts.delayed)
    # In `parts` before optimizers can be refused: detaching restores the module through it.
    local_model = parts.local_model = LocalModel(
        layout.module,
        _ownership(layout, mesh.pp),
        mesh,
        parts.config,
        parts.delayed,
        parts.ledger,
        split=layout.split,
        copies=copies,
    )
    local_model.show_gradients(everyone=parts.gradients_are_seen)
    local_model.take_optimizers(parts.optimizers)
    parts.pending.load(local_model.holdings)
    transport = _connect(parts, local_model)
    if is_first and transport is not None:
        parts.describe(render_paths(measure_paths(transport, parts.device)))
    if is_first and (sums := local_model.reduction.describe()):
        parts.describe(sums)
    return local_model


def resume(parts: EngineParts) -> None:
    """Begin another run with the local model of the last one, and with other optimizers. Collective over all ranks.

    Raises:
        ConfigError: an optimizer cannot update parts.
        UnsupportedError: a hook that was registered since the last run computes with parts of split layers.
    """
    local_model = parts.spread
    refuse_new_hooks(parts.layout)
    local_model.take_optimizers(parts.optimizers)
    parts.pending.load(local_model.holdings)
    _connect(parts, local_model)


def make_whole_again(parts: EngineParts, first: FirstStep, error: NewUseError) -> None:
    """Undo :func:`parallelize`; the next one gives every rank the weights that a new kind of step uses. Collective.

    Raises:
        NewUseError: ranks have gradients, or state of optimizers, for the weights that they have now.
    """
    layout, module = parts.layout, parts.layout.module
    holds = any(each.state for each in parts.optimizers) or any(each.grad is not None for each in module.parameters())
    is_final = holds or parts.config.delayed_parameter_initialization
    if any(collectives.gather_objects(is_final, "weights that every rank needs")):
        raise NewUseError(
            f"{error} Let the parts of the unit that are called be units themselves: mark them "
            "(`self.part = smp_strategy.unit(...)`), or name their classes in `unit_classes`."
        )
    parts.spread.restore("all")
    parts.calls.give_back()
    parts.calls.intercept(layout.units, module)
    found = dry_run(first.step, first.microbatches[0], first.loss_of, parts.dry_run_input())
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    used = {id(each) for each in (*layout.used_by_glue, *found.used_by_glue)}
    assert layout.partition is not None
    _, names = agree_on(layout.partition, [name for name, tensor in tensors.items() if id(tensor) in used])
    layout.used_by_glue = tuple(tensors[name] for name in names)
    parts.report(
        f"Code above the units computes with {len(names)} of their parameters (`{names[0]}`), for the first time in a "
        f"step of the kind {first.kind}: every rank holds these as a whole. To have the parts that it calls "
        "distributed as well, mark them with `smp_strategy.unit`."
    )


def _connect(parts: EngineParts, local_model: LocalModel) -> Transport | None:
    """Let the runtime of this rank's stage answer calls of units, and show hooks full weights; returns the transport to
    the other stages, if there are any. Collective.
    """
    mesh, calls = parts.mesh, parts.calls
    transport = None
    if mesh.pp > 1:
        channels = open_channels(mesh.stage_ranks, mesh.pp_group, parts.config.stage_transport, parts.device)
        transport = Transport(mesh.stage_ranks, mesh.pp_group, parts.timeout, channels, mesh.more_stage_groups())
    local_model.show_in(parts.views, transport, lambda: parts.optimizers)
    if calls.mixed_precision is not None:
        calls.mixed_precision.keep(local_model.whole_parameters)
    calls.runtime = _runtime(parts, local_model, transport)
    return transport


def _split_layers(parts: EngineParts, first: FirstStep, group: TensorGroup) -> None:
    """Split layers over ``group``, as in the last run if there was one."""
    layout, config, calls = parts.layout, parts.config, parts.calls

    def run_step() -> None:
        calls.intercept(layout.units, layout.module)
        try:
            with parts.delayed.pretending():
                run_for_real(first.step, first.microbatches[0], first.loss_of, parts.dry_run_input())
        finally:
            calls.give_back()

    last = layout.split if layout.split_report is not None else None
    before = None if last is None else dict(last.cuts)
    # Interception keeps the `forward` of units as it was then; splitting changes it, so intercept again afterwards.
    calls.give_back()
    try:
        layout.split = split_layers(
            layout.module,
            group,
            patterns=config.tensor_parallel,
            strict=config.tensor_parallel_strict,
            stream_dim=config.stream_dim,
            run_step=run_step,
            before=None if last is None else last.watched,
        )
        layout.split.report.refuse_unsplit()
    finally:
        calls.intercept(layout.units, layout.module)
    parts.delayed.divide(layout.split)
    if before is not None:
        _refuse_other_cuts(layout.module, layout.split, before)


def _refuse_other_cuts(module: nn.Module, split: SplitModule, before: Mapping[nn.Parameter, Cut]) -> None:
    """Refuse cuts that differ from those ``before``, which optimizers have state for.

    Raises:
        SMPError: they differ.
    """
    if before == split.cuts:
        return
    odd = {id(parameter) for parameter, _ in before.items() ^ split.cuts.items()}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in odd]
    where = f"`{names[0]}` ({split.report.why(names[0])})" if names else "Layers"
    raise SMPError(
        f"{where} would be split otherwise than in the last run of this strategy, which optimizers have state "
        "for: modules, patterns, hooks or who reads weights have changed. Use a new strategy object."
    )


def _decide_partition(parts: EngineParts, first: FirstStep) -> None:
    """Decide the stage of each unit, make the plan cache, and report both."""
    layout, shape, group = parts.layout, parts.mesh.shape, parts.layout.group
    # Plan and report the microbatches that will run: a batch may have too few samples for the option.
    config, num_run = parts.config, len(first.microbatches)
    if first.kind in ("train", "manual") and num_run < config.num_microbatches(shape.pp):
        config = replace(config, microbatches=num_run)
    with heads_explained(parts.config.tensor_parallel or {}):
        layout.partition, found, layout.costs = decide(
            config,
            first.inputs(parts),
            shape,
            first=(first.step, first.microbatches[0], first.loss_of),
            given=layout.given,
            chosen=layout.recomputed.units,
            num_parameters=layout.num_parameters,
            measuring=group.alone,
        )
    whole = first.note_comparison(parts, found.comparison) if len(first.sizes) > 1 else None
    if whole is not None:
        _decide_partition(parts, whole)
        return
    refuse_rewritten(parts)
    if layout.partition.most_live is not None:
        parts.config = replace(parts.config, sdp_max_live_parameters=layout.partition.most_live)
    layout.activation_policies = layout.partition.activation_policies
    layout.used_by_glue = found.used_by_glue
    layout.known_plans = plans = PlanCache(
        parts.config, layout.partition, layout.costs, parts.describe, partial(_agree_on_trace, group)
    )
    if found.trace is not None and found.trace.loss is not None:
        plans.learn(first.kind, found.trace)
    chosen = _why_stages(parts, first, found)
    chosen_options = chosen_for_memory(config, layout.partition)
    notes = (note_on_others(os.environ, option_types()), layout.costs.render(), chosen, chosen_options)
    for note in filter(None, notes):
        parts.report(note)
    parts.describe(render_layout(shape, layout.partition, config, layout.split_report))


def _why_stages(parts: EngineParts, first: FirstStep, found: DryRun) -> str:
    """Why ranks are stages, if nobody has given degrees; otherwise empty."""
    shape, config, layout = parts.mesh.shape, parts.config, parts.layout
    assert layout.partition is not None
    is_free = "pipeline_parallel_degree" in parts.chosen and config.smp_report != "quiet"
    if not is_free or shape.pp == 1 or found.trace is None:
        return ""
    limits = [stage.memory_limit for stage in layout.partition.stages if stage.memory_limit is not None]
    now, *others = estimates_on_ranks(
        config,
        first.inputs(parts),
        found,
        layout.costs,
        JobLayout(shape.pp, 1, 1, shape.dp, len(first.microbatches), first.sizes[0]),
        node_size=shape.node_size or shape.world_size,
        limit=min(limits, default=sys.maxsize),
    ) or (None,)
    return "" if now is None else chosen_text(now, others)


def _agree_on_trace(group: TensorGroup, trace: Trace) -> Trace:
    """``trace`` of the first rank of the tensor-parallel group. Collective over it."""
    first = group.objects(trace)[0]
    return Trace(first.events, first.loss)


def _ownership(layout: Layout, num_stages: int) -> Ownership:
    """Map from tensors to stages. It is not kept from an earlier run: buffers may have been replaced since."""
    assert layout.partition is not None
    return Ownership(
        layout.module, layout.units, layout.partition.stage_of, num_stages, used_by_glue=layout.used_by_glue
    )


def _runtime(parts: EngineParts, local_model: LocalModel, transport: Transport | None) -> Runtime:
    """Runtime that executes the user's code on this rank's stage; ``transport`` leads to the others."""
    layout, mesh = parts.layout, parts.mesh
    assert layout.partition is not None
    glue = parts.glue()
    stage = Stage(
        number=mesh.stage,
        stage_of=layout.partition.stage_of,
        num_stages=mesh.pp,
        shape_inference=layout.shape_inference,
        transport=transport,
        device=parts.device,
        with_weights=partial(_watched, parts, local_model),
        activations=_activations(parts, glue),
        backward=widening_backward if local_model.sums_wider else torch.autograd.backward,
        reads_refused=local_model.reads_refused,
        parameters_refused=local_model.parameters_refused,
        glue=glue,
        replicas=replicas_of(mesh),
        agree=layout.group.all_of,
        note_inputs=layout.group.note_inputs if mesh.tp > 1 else None,
    )
    if parts.config.compile:
        for name in (name for name, owner in stage.stage_of.items() if owner == stage.number):
            parts.calls.compile(name)
    parts.carried = stage.carried
    return Runtime(stage, parts.private_state(glue), note_call=stage.carried.note if mesh.pp > 1 else None)


def _watched(
    parts: EngineParts, local_model: LocalModel, unit: str, function: Callable[..., Any], token: object
) -> Callable[..., Any]:
    """``function`` with weights in place, and looked at by the monitor if it searches for NaN and infinity."""
    function = local_model.with_weights(unit, function, token)
    if parts.monitor is None or not parts.monitor.searches:
        return function
    return parts.monitor.around_unit(unit, function, token)


def _activations(parts: EngineParts, glue: Sequence[nn.Module]) -> UnitWrapper:
    """Wrapper that applies the activation policies of units and of their submodules."""
    layout, device = parts.layout, parts.device

    def reached(unit: nn.Module) -> tuple[Sequence[nn.Module], Sequence[Any]]:
        return glue, reached_by_hooks(list(unit.modules()))

    activations = UnitWrapper(layout.activation_policies, device, reached, offload=_offload(parts))
    inside = layout.recomputed.inside.items()
    submodules = {name: (layout.module.get_submodule(name), policy) for name, policy in inside}
    parts.calls.recompute_inside(submodules, activations, device)
    return activations


def _offload(parts: EngineParts) -> Offload:
    """Offload of the activations of units whose policies ask for it."""
    module, copies = parts.layout.module, HostCopies(parts.device)
    if not any(policy.offload for policy in parts.layout.activation_policies.values()):
        return Offload(copies)
    return Offload(
        copies,
        horizon=parts.config.activation_loading_horizon,
        min_bytes=parts.config.least_offloaded,
        weights=lambda: itertools.chain(module.parameters(), module.buffers()),
    )
