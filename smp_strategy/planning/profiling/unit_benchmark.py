"""One call of a unit, run by itself: how long it takes and what it makes autograd keep.

The unit computes with copies of its parameters and buffers, so it need not have any values (a unit on the meta device
gets random ones), and nothing that it does reaches them. Random streams, attributes and containers that its hooks
reach are put back.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smp_strategy.distributed.device import is_host, wait_for_all
from smp_strategy.model.rng import seeded
from smp_strategy.model.trace.fake_call import call as call_with
from smp_strategy.model.trace.fake_call import imitate, stand_in, tensors_of
from smp_strategy.model.trace.pytree import flatten, unflatten_call
from smp_strategy.model.trace.saved_tensors import counting_saved
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.model.trace.work import Work
from smp_strategy.pipeline.microbatch_state import reached_by_hooks
from smp_strategy.pipeline.segments import Import, enter
from smp_strategy.pipeline.split_backward import Deferred, backward_of_imports
from smp_strategy.pipeline.user_collectives import ReplicaCollectives, Replicas
from smp_strategy.planning.profiling.recorded_calls import RecordedCall

__all__ = ["Sample", "measure_alone"]

WARM_UPS = 2
FEWEST_REPEATS, MOST_REPEATS = 10, 25
# Repeats end after this time, once there are enough.
ENOUGH_SECONDS = 0.25
# Standard deviation over the median of deviations, where times are distributed normally.
NORMAL = 1.4826


class Sample(NamedTuple):
    """What was measured of a call."""

    work: Work
    """Medians; zeros where times are not asked for."""
    saved_bytes: int
    split_seconds: float = 0.0
    """What its backward takes longer in two parts."""
    spread_seconds: float = 0.0
    """How far what it takes is from that: the standard deviation, as the median of all deviations tells it."""


def measure_alone(
    call: RecordedCall, device: torch.device, *, times: bool, memory: bool, num_replicas: int = 1
) -> Sample:
    """Run ``call`` on ``device``.

    Args:
        call: what is run.
        device: where.
        times: whether to repeat it and take times.
        memory: whether to look at what autograd keeps.
        num_replicas: would meet in its collectives; here it meets nobody.
    """
    module = call.callee.module
    assert module is not None
    alone = ReplicaCollectives(Replicas(size=num_replicas), meets=False)
    with (
        closing(alone),
        _untouched(module),
        seeded(0, device),
        torch.inference_mode(False),
        alone.open(),
    ):
        dtypes = call.callee.dtype_of_weights()
        weights = {name: _copy(tensor, device, dtypes.get(name)) for name, tensor in tensors_of(module).items()}
        saved = _saved_bytes(call, weights, device) if memory else 0
        if not times:
            return Sample(Work(), saved)
        return _times(call, weights, device)._replace(saved_bytes=saved)


def _times(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> Sample:
    """What it takes; nothing of what it makes autograd keep."""
    for _ in range(WARM_UPS):
        _turn(call, weights, device)
    found: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    while len(found) < FEWEST_REPEATS or (len(found) < MOST_REPEATS and time.perf_counter() - begin < ENOUGH_SECONDS):
        found.append(_turn(call, weights, device))
    forward, whole, first, later = map(statistics.median, zip(*found, strict=True))
    totals = [forward + whole for forward, whole, *_ in found]
    usual = statistics.median(totals)
    spread = NORMAL * statistics.median([abs(total - usual) for total in totals])
    if not first:
        return Sample(Work(forward, 0.0, whole), 0, 0.0, spread)
    # Runs of the same turn are compared: a machine that is slower for a while is so for both.
    longer = statistics.median([first + later - whole for _, whole, first, later in found])
    later = min(later, whole)
    return Sample(Work(forward, whole - later, later), 0, max(longer, 0.0) if later else 0.0, spread)


def _turn(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> tuple[float, float, float, float]:
    """Seconds of forward, of backward as a whole, and of its two parts, of which one may be missing.

    The second part comes when the whole has run in between. In a timetable, too, others run there, after which what it
    works on is in no cache any more. Right after the first part it would seem cheaper than it is.
    """
    _, first, deferred = _time_once(call, weights, device, splits=True)
    forward, whole, _ = _time_once(call, weights, device, splits=False)
    return forward, whole, first, _timed(deferred.run, device)[0] if deferred else 0.0


def _time_once(
    call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device, *, splits: bool
) -> tuple[float, float, Deferred]:
    """Seconds of forward, and of backward as a whole or of its first part; with what is left of it then."""
    imports: list[Import] = []
    inputs = [_entered(_real(leaf, device), imports) for leaf in call.leaves]
    forward, result = _timed(lambda: _run(call, weights, inputs, device), device)
    results = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results:
        return forward, 0.0, Deferred()
    gradients = [torch.ones_like(tensor) for tensor in results]
    if not splits:
        whole, _ = _timed(lambda: torch.autograd.backward(results, gradients), device)
        return forward, whole, Deferred()
    first, deferred = _timed(lambda: backward_of_imports(results, gradients, set(imports)), device)
    return forward, first if imports else 0.0, deferred


def _entered(leaf: Any, imports: list[Import]) -> Any:
    """An argument as it comes from another stage."""
    if not (isinstance(leaf, Tensor) and leaf.requires_grad):
        return leaf
    imports.append(Import(-1, None))
    return enter(leaf, imports[-1])


def _saved_bytes(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> int:
    inputs = [_real(leaf, device) for leaf in call.leaves]
    if is_host(device):
        with counting_saved(weights.values()) as saved_bytes:
            _run(call, weights, inputs, device)
        return saved_bytes()
    before = torch.accelerator.memory_allocated(device)
    result = _run(call, weights, inputs, device)
    kept = torch.accelerator.memory_allocated(device) - before
    del result
    return kept


def _run(call: RecordedCall, weights: Mapping[str, Tensor], inputs: Sequence[Any], device: torch.device) -> Any:
    args, kwargs = unflatten_call(inputs, call.structure)
    # Anew for each run: autocast keeps casts of weights, with their graph, as long as it lasts.
    with call.modes.entered(device.type):
        return call_with(call.callee, dict(weights), args, kwargs)


def _timed(action: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    wait_for_all(device)
    begin = time.perf_counter()
    result = action()
    wait_for_all(device)
    return time.perf_counter() - begin, result


# Tensors


def _copy(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A leaf with the values of ``tensor``, or random ones, as the unit sees it."""
    if tensor.is_meta:
        spec = replace(TensorSpec.of(tensor), requires_grad=False, dtype=dtype or tensor.dtype)
        return _made(spec, device).requires_grad_(tensor.requires_grad)
    return tensor.detach().to(device, dtype, copy=True).requires_grad_(tensor.requires_grad)


def _real(leaf: Any, device: torch.device) -> Any:
    """An argument with values."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to(device, copy=True)
    return stand_in(leaf, lambda spec: _made(spec, device))


def _made(spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor like ``spec``: random numbers, zeros for whole ones, ``True`` for truth values."""
    made = imitate(replace(spec, device=device))
    # All of its memory, of which it may be a view that overlaps itself.
    memory = torch.empty(0, dtype=spec.dtype, device=device).set_(made.untyped_storage())
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        memory.normal_()
    else:
        memory.fill_(spec.dtype is torch.bool)
    return made


def _untouched(module: nn.Module) -> Snapshot:
    parts = list(module.modules())
    return Snapshot(modules=parts, containers=reached_by_hooks(parts))
