"""In-place operations on plain tensors (replicated on every stage) with placed tensors as arguments.

``out = torch.zeros(...); out[:, 0] = h`` begins with a tensor that exists everywhere and ends with one that depends on
a unit. If gradients flow through it, the plain tensor becomes a placed one. Otherwise (a queue of keys, a running mean
in a buffer) every stage gets the values and makes the change itself, so that buffers stay equal on all stages.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from smp_strategy.distributed.torch_private import num_storage_uses
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.prediction import Prediction
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["is_plain", "must_run_everywhere", "refuse_changed_plain"]

# References to the memory of an unshared tensor: the tensor's own, and that of the storage object that is queried.
UNSHARED = 2


def is_plain(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor, or a view of one, that exists on every stage."""
    return not isinstance(leaf, PlacedTensor) or leaf.memory.is_plain


def must_run_everywhere(name: str, leaves: Sequence[Any], prediction: Prediction, plain: Sequence[int]) -> bool:
    """Whether every stage should apply the operation, rather than one stage that has taken over the plain tensors.

    Args:
        name: name of the operation.
        leaves: flattened arguments.
        prediction: prediction of the operation.
        plain: positions of the plain tensors that it will change.

    Raises:
        UnsupportedError: neither is possible.
    """
    if any(isinstance(leaves[position], PlacedTensor) for position in plain):
        raise _refusal(name, leaves[plain[0]])
    results = [*prediction.made, *prediction.changed.values()]
    if not any(spec.requires_grad for spec in results):
        return True
    for position in plain:
        tensor = leaves[position]
        if tensor._is_view() or num_storage_uses(tensor) > UNSHARED:
            raise _refusal(name, tensor)
    return False


def refuse_changed_plain(name: str, leaves: Sequence[Any], prediction: Prediction) -> None:
    """Refuse an unpredictable call that has changed plain tensors on the one stage that ran it."""
    for position in prediction.changed:
        if is_plain(leaves[position]):
            raise _refusal(name, leaves[position])


def _refusal(name: str, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"`{name}` changes a tensor in place that exists on every stage and shares its memory with others (shape "
        f"{list(tensor.shape)}), but runs on one stage only. Use an operation that returns a new tensor, or move the "
        "code into an nn.Module that belongs to a unit."
    )
