"""All gradients in sight of the user's hooks, although each stage has only its own.

Hooks that log gradient norms or rescale gradients are written for one process: they go over ``model.parameters()``
and read ``.grad``. While such a hook runs, every parameter's ``.grad`` is a placed tensor that lives where the
parameter lives. The hook runs on every stage like the code above the units in a step does: norms are computed where
the gradients are, numbers that it reads are the same everywhere, and in-place changes reach the real gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.mesh import ProcessMesh
from smp_strategy.ownership import Ownership
from smp_strategy.pipeline.placed import PlacedTensor
from smp_strategy.pipeline.program import Program
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.trace.oracle import TensorSpec

__all__ = ["run_with_gradients"]


def run_with_gradients(
    hook: Callable[[], Any],
    parameters: Sequence[nn.Parameter],
    *,
    runtime: Runtime,
    ownership: Ownership,
    mesh: ProcessMesh,
    seed: int,
) -> Any:
    """Run ``hook`` on every stage of the replica; collective.

    Args:
        hook: the user's code.
        parameters: all parameters of the module, in the same order on every rank.
        runtime, ownership, mesh: the engine's.
        seed: where the hook's random numbers derive from.

    Returns:
        What ``hook`` returns, with real tensors on every stage.
    """
    before = [parameter.grad for parameter in parameters]
    exists = torch.tensor([gradient is not None for gradient in before], dtype=torch.uint8)
    dist.all_reduce(exists, op=dist.ReduceOp.MAX, group=mesh.pp_group)

    def run(program: Program) -> tuple[Any, dict[int, PlacedTensor]]:
        shown: list[PlacedTensor | None] = []
        for parameter, gradient, here in zip(parameters, before, exists.tolist(), strict=True):
            spec = replace(TensorSpec.of(parameter), requires_grad=False)
            shown.append(program.bring(spec, ownership.holders(parameter), gradient) if here else None)
            parameter.grad = shown[-1]
        given = [None if tensor is None else tensor.value for tensor in shown]
        result = hook()
        changed = {
            number: parameter.grad
            for number, parameter in enumerate(parameters)
            if isinstance(parameter.grad, PlacedTensor)
            and (parameter.grad is not shown[number] or parameter.grad.value is not given[number])
            and {program.lives_on(parameter.grad)} != ownership.holders(parameter)
        }
        return result, changed

    try:
        result, moved = runtime.run_alone(run, seed=seed)
    except BaseException:
        _restore(parameters, before)
        raise
    after = [moved.get(number, _own(parameter.grad)) for number, parameter in enumerate(parameters)]
    held = [mesh.stage in ownership.holders(parameter) for parameter in parameters]
    _restore(parameters, [gradient if here else None for gradient, here in zip(after, held, strict=True)])
    return result


def _own(gradient: Tensor | None) -> Tensor | None:
    """The real tensor behind what the hook left in ``.grad``; ``None`` where it is elsewhere."""
    if not isinstance(gradient, PlacedTensor):
        return gradient
    return gradient.origin[1] if gradient.origin is not None else None


def _restore(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
