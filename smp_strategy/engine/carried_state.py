"""Carried state: rehearsals detect steps in which a microbatch leaves state that the next one reads.

Examples are a running sum, a mean, or a count that sets a factor. Before the first step of each kind some microbatches
run dry: first one after the other, as in a single process, and then, for each stage, in turns that are as short as the
stage's messages allow. If calls get other values, or places hold other values in the end, microbatches depend on each
other. Such a step runs as in a single process: each microbatch to its end, its backward included, before the next
begins.

Nearly all steps leave tensors only, and are rehearsed once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch.nn.modules.batchnorm import _NormBase

from smp_strategy.engine.dry_run import DryRunInput, rescaled_tables, undone
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.isolation.rehearsal import EndlessError, Rehearsal
from smp_strategy.pipeline.isolation.written_values import Place
from smp_strategy.pipeline.job import Job, Step
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.surveys import rehearse

__all__ = ["Rehearsals"]

# Enough for steps that read the state of several earlier microbatches.
_MOST_MICROBATCHES = 4
# Names of no interest to the user: of the mapping that holds a module's buffers, and of containers without a name.
_UNNAMED = frozenset({"_buffers", "list", "set", "deque"})


class _RehearsalOutcome(NamedTuple):
    """Outcome of a rehearsal."""

    noted: Mapping[tuple[int, int, int, tuple[int, ...]], Any]
    """Values that calls got; see :attr:`Rehearsal.noted <smp_strategy.pipeline.isolation.rehearsal.Rehearsal>`."""
    state: Mapping[Any, Any]
    """Values of all places in the end."""
    left: Sequence[Place]
    """Places that have changed."""
    statistics: Sequence[str]
    """Norms that one call of their unit updates, and another uses as they are then."""

    def seen(self, stage: int | None) -> dict[object, Any]:
        """The values that matter on ``stage``; ``None``: on any."""
        # Names of events (argument number -1) count on all stages: each runs the whole program.
        noted = self.noted.items()
        here = {key: value for key, value in noted if stage is None or stage in key[3] or key[2] < 0}
        return {**here, **self.state}

    def differences(self, other: "_RehearsalOutcome", stage: int | None = None) -> set[object]:
        """Keys of values that matter on ``stage`` and differ from those of ``other``."""
        mine, theirs, missing = self.seen(stage), other.seen(stage), object()
        return {key for key in {*mine, *theirs} if mine.get(key, missing) != theirs.get(key, missing)}


@final
@dataclass(frozen=True, kw_only=True)
class Rehearsals:
    """Rehearsals of one kind of step. Their result is the same on all ranks of a replica."""

    step: Step
    microbatch: Any
    inputs: DryRunInput
    stage_of: Mapping[str, int]
    num_stages: int
    private_state: Callable[[], MicrobatchState]

    def carried(self) -> tuple[str, ...] | None:
        """Names of the places whose state microbatches hand on.

        ``None``: microbatches are independent, or the step cannot run without values.
        """
        # Values that a step reads are made up, and it may run to its end under one truth value only.
        for truth in (False, True):
            # The step is the user's code, and the values that it reads are made up: it may raise anything.
            try:
                ordered = self._rehearse(truth)
                self.inputs.calls.known_places.rehearsed.update(ordered.left)
                if written := (*self._written_weights(), *self._rewritten_weights(), *ordered.statistics):
                    # They are not private to a microbatch: each must find those of the one before it.
                    return written
                return self._carried(truth, ordered) if ordered.left else None
            except EndlessError:
                return None
            except Exception:
                continue
        return None

    def _carried(self, truth: bool, ordered: _RehearsalOutcome) -> tuple[str, ...] | None:
        different = set[object]()
        try:
            for stage in range(self.num_stages):
                different |= ordered.differences(self._rehearse(truth, stage), stage)
        except (Exception, EndlessError):  # in order it did not fail
            different |= ordered.seen(None).keys()
        # A second rehearsal in order excludes values that always differ: times, and random numbers from elsewhere.
        if not different or not different - ordered.differences(self._rehearse(truth)):
            return None
        names = dict.fromkeys(place.name for place in ordered.left if isinstance(place.name, str))
        return tuple(name for name in names if name not in _UNNAMED)

    def _written_weights(self) -> tuple[str, ...]:
        """Names of the weights that code above the units has written to in the last rehearsal."""
        written = self.inputs.calls.written_lately
        return tuple(name for name, parameter in self.inputs.module.named_parameters() if id(parameter) in written)

    def _rewritten_weights(self) -> tuple[str, ...]:
        """Names of the weights that their own units write to, which backwards of earlier microbatches may need.

        Rescaled tables are left out: no backward needs their earlier values.
        """
        rescaled = {id(table) for table in rescaled_tables(self.inputs.units)}
        names = self.inputs.shape_inference.rewritten
        return tuple(n for n, p in self.inputs.module.named_parameters() if n in names and id(p) not in rescaled)

    def _rehearse(self, truth: bool, stage: int | None = None) -> _RehearsalOutcome:
        """Rehearse once, in the turns of ``stage``; ``None``: one microbatch after the other."""
        inputs, calls = self.inputs, self.inputs.calls
        rehearsal, private = Rehearsal(stage, truth=truth), self.private_state()
        dry = Stage(
            number=-1,
            stage_of=self.stage_of,
            num_stages=self.num_stages,
            shape_inference=inputs.shape_inference,
            transport=None,
            device=inputs.device,
            rehearsal=rehearsal,
            glue=list(calls.exposed.above.values()),
            replicas=inputs.replicas,
        )
        number = min(inputs.num_microbatches, _MOST_MICROBATCHES)
        microbatches = [copy.deepcopy(self.microbatch) for _ in range(number)]
        modes: dict[str, set[bool]] = {}

        def note_call(microbatch: int, callee: Callee, args: Any, kwargs: Any) -> None:
            for name, part in () if callee.module is None else callee.module.named_modules():
                if isinstance(part, _NormBase) and part.track_running_stats:
                    modes.setdefault(f"{callee.key}.{name}".rstrip("."), set()).add(part.training)

        before, runtime = calls.runtime, Runtime(dry, private, note_call=note_call)
        calls.runtime = runtime
        try:
            with undone(self.step, inputs, computes=False), calls.known_places.unchanged():
                private.begin(self.step)
                found = private.snapshot()
                rehearse(runtime, Job(step=self.step, seed=0), microbatches)
                state = private.snapshot()
                left = [place for place, value in state.items() if found.get(place) != value]
                statistics = [name for name, seen in modes.items() if len(seen) > 1]
                return _RehearsalOutcome(rehearsal.noted, state, left, statistics)
        finally:
            runtime.close()
            calls.runtime = before
