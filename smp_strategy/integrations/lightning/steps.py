"""Microbatched steps: run a Lightning step once per microbatch, and merge outputs, logs and metrics.

The engine splits the batch and calls a function with each microbatch. This module makes that function, chooses its
return value, and merges the user's outputs. No parallel logic: inside the function tensors may be placed on other
ranks, so nothing here reads a value.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from smp_strategy.engine.batch_changes import apply_changes, changes_since, contents_of_batch
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.join_results import given, merge, refuse_not_joined
from smp_strategy.engine.step_results import loss_that_commits
from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.lightning.logging import LogRecorder
from smp_strategy.integrations.lightning.metric_values import NotedForwards, settle
from smp_strategy.integrations.lightning.metrics import share_value

__all__ = ["Context", "accumulation_window", "run_eval_step", "run_manual_step", "run_training_step"]

# Hook that gets the batch of a step when it is over.
_AFTER: Final = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}

Context = Callable[[], AbstractContextManager[Any]]


def run_training_step(
    engine: Engine,
    module: Any,
    args: Sequence[Any],
    *,
    context: Context,
    reduce: Callable[[], bool],
    continues: bool = False,
    factor: float = 1.0,
) -> Any:
    """Run ``module.training_step`` over the microbatches of ``args[0]``, forward and backward.

    Args:
        context: entered around the forward of each microbatch (the precision plugin's autocast).
        reduce: returns whether this batch ends the accumulation window; asked before the step and when the gradients
            are handed over.
        continues: whether gradients are added to those of earlier batches.
        factor: factor of the loss before its backward.

    Returns:
        The merged outputs of the step; the loss hands its gradients over in ``backward()``.
    """
    recorder = _recorder(engine, module, is_joint=engine.config.prescaled_batch)
    step = _microbatch_step(module, "training_step", recorder, args[1:], context)
    with recorder.installed(), _process_wide(context):
        result = engine.train_step(
            step, args[0], loss_of=_loss_of, factor=factor, continues=continues, reduces=reduce()
        )
    outputs = _replay(recorder, args[0], result.outputs, result.sizes)
    # If this replica skips all microbatches, others may not: so there is a loss without a gradient.
    mean = torch.zeros(()) if result.loss is None else result.loss
    loss = loss_that_commits(mean, lambda grad: result.commit(grad, reduce=reduce()))
    present = [(output, size) for output, size in zip(outputs, result.sizes, strict=True) if output is not None]
    if not present or not isinstance(present[0][0], Mapping):
        return loss
    extras = [{name: value for name, value in output.items() if name != "loss"} for output, _ in present]
    return {"loss": loss, **merge(extras, [size for _, size in present])}


def accumulation_window(trainer: Any) -> tuple[int, int]:
    """Index of the current batch in its accumulation window, as Lightning counts, and the length of a window."""
    length = trainer.accumulate_grad_batches
    return trainer.fit_loop.epoch_loop.batch_idx % length, length


def run_manual_step(engine: Engine, module: Any, args: Sequence[Any], *, context: Context) -> Any:
    """Run ``module.training_step`` under manual optimization; returns the merged outputs."""
    recorder = _recorder(engine, module, is_joint=engine.config.prescaled_batch)
    step = _microbatch_step(module, "training_step", recorder, args[1:], context)
    with recorder.installed(), _process_wide(context):
        result = engine.manual_step(step, args[0])
    return merge(_replay(recorder, args[0], result.outputs, result.sizes), result.sizes)


def run_eval_step(
    engine: Engine, module: Any, name: str, args: Sequence[Any], *, context: Context, is_joint: bool
) -> Any:
    """Run ``module.<name>`` over the microbatches of ``args[0]``, forward only; returns the merged outputs.

    ``is_joint``: all ranks of a replica have read this batch.
    """
    recorder = _recorder(engine, module, is_joint=is_joint)
    step = _microbatch_step(module, name, recorder, args[1:], context)
    with recorder.installed(), _process_wide(context):
        result = engine.eval_step(step, args[0], kind=name, is_joint=is_joint)
    merged = merge(_replay(recorder, args[0], result.outputs, result.sizes), result.sizes)
    return refuse_not_joined(merged) if name == "predict_step" else merged  # predictions are used as a whole


def _recorder(engine: Engine, module: Any, *, is_joint: bool) -> LogRecorder:
    return LogRecorder(module, tells_size=not is_joint, share=partial(share_value, engine))


def _microbatch_step(
    module: Any, name: str, recorder: LogRecorder, rest: Sequence[Any], context: Context
) -> Callable[[Any], Any]:
    step, rest = getattr(module, name), [given(value) for value in rest]
    looks = _is_looked_at(module, _AFTER[name])

    def run(microbatch: Any) -> Any:
        forwards = NotedForwards()
        before = contents_of_batch(microbatch) if looks else None
        with recorder.notes() as notes, forwards.open(), context():
            output = step(microbatch, *rest)
        changes = None if before is None else changes_since(before)
        return output, notes, forwards, changes

    return run


def _is_looked_at(module: Any, hook: str) -> bool:
    """Whether ``hook`` of the module or of a callback may look at the batch: it is not Lightning's own."""
    hooks = [getattr(each, hook, None) for each in (module, *module.trainer.callbacks)]
    names = [getattr(each, "__module__", "") for each in hooks if each is not None]
    return any(name.partition(".")[0] not in ("lightning", "pytorch_lightning") for name in names)


def _process_wide(context: Context) -> AbstractContextManager[Any]:
    """Enter ``context`` around all microbatches as well, if it changes process-wide state.

    The "true" precisions set the default dtype of the process: the threads of the microbatches would undo each other's
    setting. With an outer setting they all see, and restore, the same value. Autocast belongs to the thread, and around
    all microbatches it would affect the backward passes.
    """
    plugin = getattr(context, "__self__", None)
    return context() if str(getattr(plugin, "precision", "")).endswith("-true") else nullcontext()


def _loss_of(returned: tuple[Any, Any, Any, Any]) -> Tensor | None:
    output = returned[0]
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return loss
    raise UnsupportedError(
        "`training_step` must return the loss as a tensor, a dict with the loss under the key 'loss', or None to skip, "
        f"but returned {type(output).__name__}{f' with keys {sorted(output)}' if isinstance(output, Mapping) else ''}."
    )


def _replay(
    recorder: LogRecorder, batch: Any, returned: Sequence[tuple[Any, Any, Any, Any]], sizes: Sequence[int]
) -> list[Any]:
    recorder.replay([notes for _, notes, _, _ in returned], sizes)
    settle([forwards for _, _, forwards, _ in returned])
    apply_changes(batch, [changes for *_, changes in returned], sizes)
    return [output for output, *_ in returned]
