"""New kinds of steps: what is found out, and what is refused, before the first step of each kind runs.

Training, validation and prediction are steps of different kinds, and each has code of its own. The first step of all
decides the partition; a later kind may use other tensors, or leave other state. So each new kind runs dry before it
runs: it is *looked at*, for tensors that its ranks do not have in full, and *rehearsed*, for state that one microbatch
leaves for the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from smp_strategy.data_parallel.parameter_pieces import lost_writes
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.door_words import door_words
from smp_strategy.engine.carried_state import Rehearsals
from smp_strategy.engine.dry_run import DryRunInput, look_for_exposed, rescaled_tables
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.figures.microbatch_notes import note_on_comparison
from smp_strategy.engine.figures.startup_report import render_order
from smp_strategy.engine.layout import Layout
from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.job import Step
from smp_strategy.pipeline.shared_tensors.glue_parameters import NewUseError
from smp_strategy.pipeline.shared_tensors.weight_operations import WeightOperations
from smp_strategy.tensor_parallel.plan.observed_pairs import read_by_others

__all__ = [
    "FirstStep",
    "look",
    "needs_look",
    "on_weights",
    "refuse_new_hooks",
    "refuse_rescaled",
    "refuse_rewritten",
    "rehearse",
]


class FirstStep(NamedTuple):
    """Step of a new kind, with its batch."""

    kind: str
    """Kind of step; steps of the same kind probably take the same path."""
    step: Step
    microbatches: Sequence[Any]
    loss_of: Callable[[Any], Tensor | None] | None = None
    sizes: Sequence[int] = ()
    takes_turns: bool = True
    """Whether steps of this kind have several microbatches."""
    cut: Callable[..., tuple[list[Any], tuple[int, ...]]] | None = None
    """Cuts its batch, into ``num`` microbatches or as in training. Collective."""

    def inputs(self, parts: EngineParts) -> DryRunInput:
        """Module and environment of its dry runs."""
        inputs, trains = parts.dry_run_input(), self.kind in ("train", "manual")
        batch = (self.microbatches, self.sizes) if trains and len(self.sizes) > 1 else None
        return replace(inputs, batch=batch, num_microbatches=inputs.num_microbatches if self.takes_turns else 1)

    def note_comparison(self, parts: EngineParts, operation: str) -> "FirstStep | None":
        """Report that the loss compares samples; if nobody has asked for microbatches, have none from now on.

        Args:
            operation: Operation that compares them; empty: none does. Ranks may have found different ones.

        Returns:
            The step with its whole batch, if that is what runs from now on. Collective, if it may be.
        """
        is_free = "microbatches" in parts.chosen and self.cut is not None
        if is_free:
            operation = collectives.gather_objects(operation, "a look at the loss")[0]
        if operation and not parts.has_told_of_comparison:
            parts.has_told_of_comparison = True
            note = note_on_comparison(operation, self.sizes, num_stages=parts.mesh.pp, takes_whole=is_free)
            parts.report(note)
        if not operation or not is_free:
            return None
        assert self.cut is not None
        parts.config = replace(parts.config, microbatches=1)
        microbatches, sizes = self.cut()
        return self._replace(microbatches=microbatches, sizes=sizes)


def refuse_rescaled(parts: EngineParts) -> None:
    """Before training: refuse embeddings with ``max_norm`` if there are several replicas.

    Raises:
        UnsupportedError: replicas would rescale rows of an embedding each in its own way.
    """
    layout, num_replicas = parts.layout, parts.mesh.dp
    tables = {id(table) for table in rescaled_tables(layout.units)} if num_replicas > 1 else set[int]()
    names = [name for name, parameter in layout.module.named_parameters() if id(parameter) in tables]
    if names:
        raise UnsupportedError(
            f"`{names[0]}` is rescaled as it is used (`max_norm`), but {num_replicas} replicas use rows of their "
            "own, so that they would not have the same weights any more. Leave `max_norm` out and rescale all rows "
            "after the optimizer's step (`torch.renorm` in `on_train_batch_end`), or train with one replica."
        )


def needs_look(parts: EngineParts) -> bool:
    """Whether a new kind of step needs :func:`look` before it runs."""
    return parts.layout.module.training or parts.layout.group.size > 1 or not parts.calls.exposed.is_empty


def look(parts: EngineParts, first: FirstStep) -> None:
    """Dry run of a later kind of step, which may use tensors that the first one has not used. Collective.

    Raises:
        NewUseError: code above the units computes with weights that some ranks do not have.
        UnsupportedError: code above the units, or a hook registered since, computes with parts of split layers as if
            they were full; or units write to sharded weights.
    """
    try:
        _look(parts, first)
    except NewUseError:
        raise
    except Exception:
        if needs_look(parts):
            raise


def _look(parts: EngineParts, first: FirstStep) -> None:
    parts.spread.settle()
    layout, mesh = parts.layout, parts.mesh
    refuse_new_hooks(layout)
    has_values = mesh.pp == 1 and mesh.shard_group is None
    inputs, compared = replace(first.inputs(parts), lacking=parts.spread.holdings.lacking), list[str]()

    def run_step() -> tuple[Tensor, ...]:
        found = look_for_exposed(
            first.step, first.microbatches[0], inputs, loss_of=first.loss_of, has_values=has_values
        )
        compared.append(found.comparison)
        return found.used_by_glue

    used_parts = {id(tensor) for tensor in run_step() if tensor in layout.split.cuts}
    if used_parts and has_values:
        # A layer may read its own part: only the uses by other code are errors.
        used_parts &= read_by_others(dict(layout.module.named_modules()), run_step)
    refuse_rewritten(parts)
    found = [name for name, parameter in layout.module.named_parameters() if id(parameter) in used_parts]
    if found:
        layer = found[0].rpartition(".")[0]
        raise UnsupportedError(
            f"Code above the units computes with `{found[0]}`{f' and {len(found) - 1} more' * (len(found) > 1)}, "
            "of which `tensor_parallel_degree` gives each rank a part. Keep the layer whole "
            f'(`tensor_parallel={{"{layer}": "replicate"}}`), or move the computation into a module.'
        )
    if inputs.batch is not None:
        first.note_comparison(parts, compared[0])


def refuse_new_hooks(layout: Layout) -> None:
    """Refuse hooks that were registered on split layers since these were split.

    Raises:
        UnsupportedError: there are some.
    """
    problem = layout.split.hook_problem(dict(layout.module.named_modules(remove_duplicate=False)))
    if problem is not None:
        raise UnsupportedError(
            f"`tensor_parallel_degree`: {problem}. Register it before the first step (in `__init__` or "
            "`configure_model`; validation may come before training), which keeps the layer whole, or keep it so "
            'yourself: `tensor_parallel={"<layer>": "replicate"}`.'
        )


def refuse_rewritten(parts: EngineParts) -> None:
    """After a dry run: refuse units that write to sharded weights.

    Raises:
        UnsupportedError: a unit writes to a weight that is gathered for each use, of which a rank keeps only its shard
            of the earlier values.
    """
    rewritten = sorted(parts.layout.shape_inference.rewritten)
    if rewritten and parts.mesh.shard_group is not None:
        raise lost_writes(rewritten)


def rehearse(parts: EngineParts, first: FirstStep) -> None:
    """Find out whether microbatches of a new kind of step hand state on. Collective over the replica's ranks."""
    partition, kind = parts.layout.partition, first.kind
    assert partition is not None
    inputs = first.inputs(parts)
    # In manual steps microbatches run one after the other from barrier to barrier anyway.
    if parts.config.skip_tracing or inputs.num_microbatches == 1 or kind == "manual":
        return
    glue = parts.glue()
    names = Rehearsals(
        step=first.step,
        microbatch=first.microbatches[0],
        inputs=inputs,
        stage_of=partition.stage_of,
        num_stages=parts.mesh.pp,
        private_state=lambda: parts.private_state(glue),
    ).carried()
    # Stages in different orders would deadlock.
    all_names = collectives.gather_objects(names, "whether microbatches hand state on", parts.mesh.replica_group)
    found = next((each for each in all_names if each is not None), None)
    if found is not None:
        parts.layout.plans.carried[kind] = found
        parts.report(render_order(kind, found))


def on_weights(parts: EngineParts, kind: str, step: Step, num_microbatches: int) -> Step:
    """``step``, which may write to weights of units although no step of its kind has done so before."""
    tensors = {} if parts.local_model is None else parts.local_model.unit_tensors
    if not tensors:
        return step
    runtime, plans = parts.calls.runtime, parts.layout.plans

    def begin_use(program: MicrobatchInterpreter, name: str, writes: bool) -> None:
        # In manual steps microbatches run one after the other from barrier to barrier anyway.
        if kind in plans.carried or kind == "manual" or num_microbatches == 1:
            return
        # Until its first event a microbatch is alone on all stages, which can still leave the plan to run in order.
        if not (program.microbatch or program.program_trace.events):
            program.hands_on = True
        if writes and program.program_trace.is_planned and not program.hands_on:
            raise UnsupportedError(
                f"The step writes to `{name}`, which no step ({kind}) has done before, when other microbatches may "
                "have begun, but each must find what the one before it has written. Write before the first call of "
                f"the model, or in all steps from the first one on, or set `microbatches=1`, or {door_words().in_hook}."
            )
        if writes:
            plans.carried[kind] = (name,)
            parts.report(render_order(kind, [name]))

    def run(microbatch: Any) -> Any:
        program = None if runtime is None else runtime.current.interpreter
        assert isinstance(program, MicrobatchInterpreter)
        with WeightOperations(program, tensors, begin_use) as program.weights:
            return step(microbatch)

    return run
