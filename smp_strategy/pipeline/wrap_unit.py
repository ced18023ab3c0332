"""Wrappers around the forward of a unit, and their order.

[Note: wrapping order] From the inside out, with the place that puts each wrapper there:

1. hooks that compute weights before the forward (engine/unit_calls, pipeline/module_hooks)
2. ``torch.compile`` (engine/unit_calls)
3. casts for half precision (engine/unit_calls, precision/mixed_precision): compiled code has no casts of weights in it
4. gathers of sharded weights (data_parallel/sharded_module): everything further inside finds whole weights
5. whole weights of split layers, where a hook of the user runs (engine/hooks/full_parameters)
6. backward hooks of the module: they see the gradients of the unit's inputs and outputs
7. recomputation (activations/checkpoint): weights are gathered once more when the unit runs again
8. offload (activations/offload): it sees what a recomputed unit keeps, too
9. detection of side effects on the arguments (model/trace/side_effects): the last look at what the caller gets

Wrappers 1 to 3 are there when a call arrives (``Callee.runs``); 4 to 9 are added here, call by call.
"""

from collections.abc import Callable
from typing import Any

from smp_strategy.activations.unit_wrapper import UnitCall, UnitWrapper
from smp_strategy.model.trace.side_effects import watched
from smp_strategy.pipeline.module_hooks import with_backward_hooks
from smp_strategy.pipeline.stage import WithWeights

__all__ = ["wrap_unit"]


def wrap_unit(
    function: Callable[..., Any], call: UnitCall, *, with_weights: WithWeights, activations: UnitWrapper
) -> Callable[..., Any]:
    """Wrap ``function``, the forward of a unit as it arrives here, in wrappers 4 to 9; see [Note: wrapping order].

    Args:
        function: forward of the unit.
        call: call that is about to run.
        with_weights: adds wrappers 4 and 5.
        activations: adds wrappers 7 and 8.

    Raises:
        UnsupportedError: the unit has a deprecated backward hook.
    """
    function = with_weights(call.name, function, call.token)
    function = with_backward_hooks(call.module, function)
    return watched(activations.around(call, function))
