"""In-place operations on plain tensors (replicated on every stage) with placed tensors as arguments.

``out = torch.zeros(...); out[:, 0] = h`` begins with a tensor that exists everywhere and ends with one that depends on
a unit. If gradients flow through it, the plain tensor becomes a placed one. Otherwise (a queue of keys, a running mean
in a buffer) every stage gets the values and makes the change itself, so that buffers stay equal on all stages.

A unit runs on one stage only. Without gradients a tensor of the step that it changes (the log determinant of a flow in
validation) becomes a placed one as well; one that outlives the step gets its new values on every stage.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from smp_strategy.distributed.torch_private import num_storage_uses
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Prediction
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.pipeline.outcome import InterpretedCall
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["becomes_placed", "is_plain", "must_run_everywhere", "refuse_changed_plain"]

# References to the memory of an unshared tensor: the tensor's own, and that of the storage object that is queried.
UNSHARED = 2


def is_plain(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor, or a view of one, that exists on every stage."""
    return not isinstance(leaf, PlacedTensor) or leaf.memory.is_plain


def must_run_everywhere(call: InterpretedCall, prediction: Prediction, plain: Sequence[int]) -> bool:
    """Whether every stage, rather than one, should apply the operation, which changes the tensors at the positions
    ``plain``.

    Raises:
        UnsupportedError: a placed tensor shares memory with one of them.
    """
    _refuse_shared(call, plain)
    results = [*prediction.made, *prediction.changed.values()]
    return call.kind == "op" and not any(spec.requires_grad for spec in results)


def becomes_placed(call: InterpretedCall, prediction: Prediction, position: int, glue: Sequence[nn.Module]) -> bool:
    """Whether a plain tensor that one stage will change becomes a placed one; else every stage gets its new values.

    Raises:
        UnsupportedError: neither is possible.
    """
    tensor = call.leaves[position]
    is_shared = tensor._is_view() or num_storage_uses(tensor) > UNSHARED
    if call.kind == "op" or prediction.changed[position].requires_grad:
        if is_shared:
            raise _refusal(call.name, tensor)
        return True
    return not is_shared and not any(tensor is each for module in glue for each in leaves_of(vars(module)))


def refuse_changed_plain(call: InterpretedCall, prediction: Prediction) -> None:
    """Refuse plain tensors that an unpredictable call has changed, with a gradient, on the one stage that ran it."""
    plain = [position for position in prediction.changed if is_plain(call.leaves[position])]
    _refuse_shared(call, plain)
    for position in plain:
        if prediction.changed[position].requires_grad:
            raise _refusal(call.name, call.leaves[position])


def _refuse_shared(call: InterpretedCall, plain: Sequence[int]) -> None:
    """Refuse changes of placed tensors that share the memory of a plain one."""
    if any(isinstance(call.leaves[position], PlacedTensor) for position in plain):
        raise _refusal(call.name, call.leaves[plain[0]])


def _refusal(name: str, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"`{name}` changes a tensor in place that exists on every stage and shares its memory with others (shape "
        f"{list(tensor.shape)}), but runs on one stage only. Use an operation that returns a new tensor, or move the "
        "code into an nn.Module that belongs to a unit."
    )
