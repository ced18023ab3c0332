"""Microbenchmark of a single unit call: time of forward and backward, and bytes that autograd saves.

The unit computes with copies of its parameters and buffers, so it may be on the meta device (copies get random values
then), and never changes the originals. Random streams, attributes, and containers that its hooks reach are restored.
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
from smp_strategy.model.trace.pytree import flatten_result, unflatten_call
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
# Repeats beyond the fewest stop after this time.
ENOUGH_SECONDS = 0.25
# Standard deviation over median absolute deviation of a normal distribution.
NORMAL = 1.4826


class Sample(NamedTuple):
    """Measured costs of a call."""

    work: Work
    """Medians; zeros if times are not measured."""
    saved_bytes: int
    split_seconds: float = 0.0
    """Overhead of its backward in two parts."""
    spread_seconds: float = 0.0
    """Standard deviation of its time, estimated from the median absolute deviation."""


def measure_alone(
    call: RecordedCall, device: torch.device, *, times: bool, memory: bool, num_replicas: int = 1
) -> Sample:
    """Run ``call`` alone on ``device``.

    Args:
        call: Recorded call of a unit.
        device: Device of the measurement.
        times: Whether to repeat the call and time it.
        memory: Whether to count the bytes that autograd saves.
        num_replicas: Size of the group that its collectives expect; they exchange nothing here.
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
    """Times of repeated calls, without saved bytes."""
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
    # Paired differences within a turn: a machine that is slower for a while is so for both runs.
    longer = statistics.median([first + later - whole for _, whole, first, later in found])
    later = min(later, whole)
    return Sample(Work(forward, whole - later, later), 0, max(longer, 0.0) if later else 0.0, spread)


def _turn(call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device) -> tuple[float, float, float, float]:
    """Seconds of forward, of the whole backward, and of its two parts; a missing part takes 0.

    The whole backward runs between the two parts, as other passes do in a schedule: right after the first part, the
    second would find its data in the cache and seem cheaper than it is.
    """
    _, first, deferred = _time_once(call, weights, device, splits=True)
    forward, whole, _ = _time_once(call, weights, device, splits=False)
    return forward, whole, first, _timed(deferred.run, device)[0] if deferred else 0.0


def _time_once(
    call: RecordedCall, weights: Mapping[str, Tensor], device: torch.device, *, splits: bool
) -> tuple[float, float, Deferred]:
    """Seconds of forward, and of backward: the whole, or its first part together with the deferred second part."""
    imports: list[Import] = []
    inputs = [_entered(_real(leaf, device), imports) for leaf in call.leaves]
    forward, result = _timed(lambda: _run(call, weights, inputs, device), device)
    results = [leaf for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not results:
        return forward, 0.0, Deferred()
    gradients = [torch.ones_like(tensor) for tensor in results]
    if not splits:
        whole, _ = _timed(lambda: torch.autograd.backward(results, gradients), device)
        return forward, whole, Deferred()
    first, deferred = _timed(lambda: backward_of_imports(results, gradients, set(imports)), device)
    return forward, first if imports else 0.0, deferred


def _entered(leaf: Any, imports: list[Import]) -> Any:
    """Argument as if received from another stage."""
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
    # New modes for each run: autocast caches casts of weights, with their graph, as long as it lasts.
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
    """Leaf tensor with the values of ``tensor``, or random ones, in the dtype that the unit computes with."""
    if tensor.is_meta:
        spec = replace(TensorSpec.of(tensor), requires_grad=False, dtype=dtype or tensor.dtype)
        return _made(spec, device).requires_grad_(tensor.requires_grad)
    return tensor.detach().to(device, dtype, copy=True).requires_grad_(tensor.requires_grad)


def _real(leaf: Any, device: torch.device) -> Any:
    """Argument with values instead of metadata."""
    if isinstance(leaf, Tensor):
        return leaf.detach().to(device, copy=True)
    return stand_in(leaf, lambda spec: _made(spec, device))


def _made(spec: TensorSpec, device: torch.device) -> Tensor:
    """Tensor like ``spec``: random for floating point, zeros for integers, ``True`` for booleans."""
    made = imitate(replace(spec, device=device))
    # Fill the whole storage: the tensor may be a view that overlaps itself.
    memory = torch.empty(0, dtype=spec.dtype, device=device).set_(made.untyped_storage())
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        memory.normal_()
    else:
        memory.fill_(spec.dtype is torch.bool)
    return made


def _untouched(module: nn.Module) -> Snapshot:
    parts = list(module.modules())
    return Snapshot(modules=parts, containers=reached_by_hooks(parts))
