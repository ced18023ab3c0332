"""Every step: its batch is cut into microbatches, becomes a job, and runs under the schedule planned for it.

A job has what the microbatches of one batch share: the user's code, the weights of their losses, and a random seed.
After the step the plan cache learns its path for the next one.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.agreement.same_inputs import NO_INPUTS, compare_with_earlier
from smp_strategy.engine.commands.profiling_run import end_if_profiled
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.figures.first_step_report import describe_first_step
from smp_strategy.engine.figures.microbatch_notes import (
    note_on_whole_batches,
    notes_on_buffers,
    notes_on_microbatches,
    notes_on_objects,
    told_of_microbatches,
)
from smp_strategy.engine.new_step_kinds import FirstStep, on_weights
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import derive_seed
from smp_strategy.model.samples import BatchSource
from smp_strategy.pipeline.job import Job, Step, StepRun
from smp_strategy.pipeline.microbatch import split
from smp_strategy.pipeline.recording import Recorded
from smp_strategy.reports.timeline.clocks import gather
from smp_strategy.tensor_parallel.joint_batch import join

__all__ = ["begin", "cut", "evaluation_job", "finish", "memory_explained", "run_step", "training_job", "warn_of_fewer"]

# Random streams beside that of the training steps: what evaluation and hooks draw must not change training.
EVALUATION = 1


def cut(
    parts: EngineParts,
    batch: Any,
    kind: str,
    known: Callable[[], BatchSource | None],
    *,
    is_joint: bool = False,
    inputs: Any = None,
    num: int | None = None,
) -> tuple[list[Any], tuple[int, ...]]:
    """Microbatches and their sizes, from the samples of all ranks of the tensor-parallel group. Collective.

    Args:
        known: Returns facts that the data loader knows about the samples.
        is_joint: Whether all these ranks have read this batch, whatever ``prescaled_batch`` says; else see
            :func:`~smp_strategy.tensor_parallel.joint_batch.join`.
        inputs: Inputs of a step without a batch.
        num: Number of microbatches; ``None``: that of training.

    Raises:
        UnsupportedError: the batch cannot be cut, or batches of ranks do not fit together, or ranks of a replica have
            different ones.
    """
    group, config, doing = parts.layout.group, parts.config, f"a step ({kind})"
    joins = group.size > 1 and not (is_joint or config.prescaled_batch)
    digest = parts.digest_of(kind, batch if inputs is None else inputs)
    group.begin(doing, NO_INPUTS if joins else digest)
    if parts.mesh.pp > 1:
        compare_with_earlier(digest, doing, parts.mesh.pp_group)
    source = known()
    if joins:
        batch, source = join(batch, group, source)
    wanted = config.num_microbatches(parts.mesh.pp) if num is None else num
    try:
        return split(batch, wanted, source)
    except UnsupportedError as error:
        if wanted == 1 or "microbatches" not in parts.chosen:
            raise
        whole = split(batch, 1, source)  # refused as well, if the number of microbatches is not what is wrong
        parts.report(note_on_whole_batches(error))
    parts.config = replace(parts.config, microbatches=1)
    return whole


def begin(
    parts: EngineParts, first: FirstStep, num: int | None, prepare: Callable[[FirstStep], None]
) -> tuple[list[Any], tuple[int, ...]]:
    """Cut the batch of ``first``, which has no microbatches yet, into ``num`` or as in training, and prepare the step.
    Collective.
    """
    assert first.cut is not None
    # The partition is made for training, so the first step is looked at with a microbatch of that.
    was_decided, before = parts.partition is not None, parts.config
    microbatches, sizes = first.cut(num=num if was_decided else None)
    parts.calls.refuse_new_weight_hooks()
    if parts.local_model is not None:
        parts.local_model.refuse_broken_update()
    with told_of_microbatches(sizes):
        prepare(first._replace(microbatches=microbatches, sizes=sizes))
    if parts.config is before and (was_decided or num is None):
        return microbatches, sizes
    return first.cut(num=num)


def warn_of_fewer(config: SMPConfig, num_run: int) -> None:
    """Warn that a batch has fewer samples than microbatches are asked for; ``num_run`` microbatches are run."""
    wanted = config.microbatches
    if wanted is not None and num_run < wanted:
        warnings.warn(
            f"`microbatches` is {wanted}, but the batch has too few samples for that: {num_run} will be run. Use "
            f"batches of at least {wanted} samples, or set `microbatches={num_run}`.",
            stacklevel=2,
        )


def training_job(
    parts: EngineParts,
    kind: str,
    step: Step,
    microbatches: Sequence[Any],
    sizes: Sequence[int],
    loss_of: Callable[[Any], Tensor | None] | None = None,
    *,
    sums: bool = False,
) -> Job:
    """Job of the next training step: losses are weighted by samples.

    Args:
        parts: Parts of the engine; counts the step, and reports advice before the first one.
        loss_of: Picks the loss out of the result of ``step``; ``None``: the step runs backward itself.
        sums: Whether losses are added up instead.
    """
    total = parts.num_samples = sum(sizes) or 1
    if not parts.has_counted:
        parts.has_counted = True
        notes = notes_on_microbatches(parts.layout.module, sizes, averages=loss_of is not None and not sums)
        for note in (*notes, *notes_on_objects(microbatches)):
            parts.report(note)
        written, replicas = parts.layout.shape_inference.written_buffers, parts.mesh.dp
        replicas = replicas if parts.config.broadcast_buffers else 1
        for note in notes_on_buffers(parts.layout.module, written, replicas=replicas, microbatches=len(sizes)):
            parts.report(note)
    parts.num_steps += 1
    if parts.monitor is not None:
        parts.monitor.begin_step(parts.num_steps, microbatches, sizes)
    seed = derive_seed(parts.seed, parts.mesh.dp_rank, parts.num_steps)
    weights = [1.0] * len(sizes) if sums else [size / total for size in sizes]
    terms = None if sums else parts.loss_weighting.begin(kind, microbatches, sizes)
    step = on_weights(parts, kind, step, len(sizes))
    return Job(step=step, seed=seed, loss_of=loss_of, weights=weights, loss_weights=terms)


@contextmanager
def memory_explained(num_microbatches: int) -> Iterator[None]:
    """Context of an evaluation: if the device has too little memory for a whole batch, the error says what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if num_microbatches == 1:
            error.add_note(
                "Steps without gradients get whole batches. `evaluation_microbatches` cuts them, as `microbatches` "
                "does in training."
            )
        raise


def evaluation_job(parts: EngineParts, kind: str, step: Step, microbatches: Sequence[Any], sizes: Sequence[int]) -> Job:
    """Job of the next step without backward; ``parts`` counts it."""
    parts.num_evaluations += 1
    if parts.monitor is not None:
        parts.monitor.interrupt()
    seed = derive_seed(parts.seed, parts.mesh.dp_rank, parts.num_steps, EVALUATION, parts.num_evaluations)
    step = on_weights(parts, kind, step, len(sizes))
    return Job(step=step, seed=seed, loss_weights=parts.loss_weighting.begin(kind, microbatches, sizes))


def run_step(parts: EngineParts, kind: str, job: Job, microbatches: Sequence[Any]) -> StepRun:
    """Run ``job`` with every microbatch."""
    runtime, plans = parts.calls.runtime, parts.layout.plans
    assert runtime is not None
    order = plans.order_of(kind, len(microbatches))
    job = replace(job, expected=order.expected, carries_state=kind in plans.carried)
    run, recording = runtime.run(job, microbatches, order.plan)
    if job.loss_of is None or any(loss is not None for loss in run.losses):  # else the batch was skipped
        plans.learn(kind, run.trace)
    parts.loss_weighting.end(kind, run.trace.signature)
    if job.loss_of is not None:
        if parts.monitor is not None:
            parts.monitor.end_step(run, recording)
        if order.plan is not None:
            parts.recorded = Recorded(parts.num_steps, order.plan, recording)
    return run


def finish(parts: EngineParts) -> None:
    """End a step of any kind; save its trace, and report on the first training step. Collective then."""
    parts.loss_weighting.end()
    if parts.monitor is not None:
        parts.monitor.save_trace(parts.recorded, lambda: gather(parts.recorded, parts.mesh, parts.timeout))
    # After a validation, the path of the first training step is new, and the second one is the first with a schedule.
    if not parts.has_described and (parts.recorded is not None or parts.num_steps > 1):
        parts.has_described = True
        if parts.config.smp_report != "quiet":
            parts.report(describe_first_step(parts))
        end_if_profiled()
