"""Run a step in the order that is planned for it, and learn its path for the next one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smp_strategy.engine.plan_cache import PlanCache
from smp_strategy.pipeline.job import Job, StepRun
from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.schedule import Plan

__all__ = ["run_step"]


def run_step(
    runtime: Runtime, plans: PlanCache, kind: str, job: Job, microbatches: Sequence[Any]
) -> tuple[StepRun, Plan | None, Recording]:
    """Run ``job`` with every microbatch.

    Args:
        runtime: of this rank's stage.
        plans: of the module's steps.
        kind: steps of one kind probably take the same path.
        job: what is done with every microbatch.
        microbatches: of the batch.

    Returns:
        The results, the plan (``None``: the step ran in program order) and when this stage did what.
    """
    order = plans.order_of(kind, len(microbatches))
    if order.plan is not None:
        job = replace(job, gate=order.gate, expected=order.expected)
    run, recording = runtime.run(job, microbatches, order.plan)
    if job.loss_of is None or any(loss is not None for loss in run.losses):  # else the batch was skipped
        plans.learn(kind, run.trace)
    return run, order.plan, recording
