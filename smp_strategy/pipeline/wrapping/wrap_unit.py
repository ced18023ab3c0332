"""Wrappers around the forward of a unit, and their order; calls of units that no program routes.

[Note: wrapping order] From the inside out, with the place that puts each wrapper there:

1. hooks that compute weights before the forward (engine/unit_calls, wrapping/module_hooks)
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

from torch import nn

from smp_strategy.activations.unit_wrapper import UnitCall, UnitWrapper
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.side_effects import watched
from smp_strategy.pipeline.placed_tensor import Interpreter
from smp_strategy.pipeline.stage import Stage, WithWeights
from smp_strategy.pipeline.wrapping.module_hooks import with_backward_hooks

__all__ = ["call_directly", "holds", "wrap_unit"]


def wrap_unit(
    function: Callable[..., Any], call: UnitCall, *, with_weights: WithWeights, activations: UnitWrapper
) -> Callable[..., Any]:
    """Wrap ``function``, the forward of a unit as it arrives here, in wrappers 4 to 9; see [Note: wrapping order].

    Raises:
        UnsupportedError: the unit has a deprecated backward hook.
    """
    function = with_weights(call.name, function, call.token)
    function = with_backward_hooks(call.module, function)
    return watched(activations.around(call, function))


def call_directly(unit: Callee, args: Any, kwargs: Any, *, stage: Stage, program: Interpreter | None) -> Any:
    """Call a unit that is called inside another unit, or outside of a step.

    Raises:
        UnsupportedError: its weights are on another stage.
    """
    # Inside another unit: its weights are there if that unit contains this one, and a dry run needs none.
    if program is not None and (program.is_predicting or holds(program.enclosing, unit.module)):
        return unit.function(*args, **kwargs)
    name = str(unit.key)
    if stage.stage_of[name] != stage.number:
        raise UnsupportedError(
            f"Unit `{name}` lives on stage {stage.stage_of[name]} and was called "
            f"{'inside another unit' if program else 'outside of a step'} on stage {stage.number}, where its "
            "weights are not. Call the model inside a training, validation, test or predict step."
        )
    return stage.with_weights(name, unit.runs, None)(*args, **kwargs)


def holds(outer: nn.Module | None, inner: nn.Module | None) -> bool:
    return outer is not None and any(part is inner for part in outer.modules())
