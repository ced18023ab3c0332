"""Saved inputs of a checkpointed call.

Autograd itself saves the input tensors, in a node that belongs to no graph: hooks on saved tensors see them (and may
offload them), an in-place change is detected, and they are freed with the graph that leads to them. A tensor returned
by an earlier call of the checkpoint group is not saved, because that call is recomputed too
(:mod:`smp_strategy.activations.checkpoint_groups`).

Each run gets tensors without history. They require gradients where those of the call did, and are not leaves, so the
run may change them in place as the call may have. Arguments that were one tensor are one tensor again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["KeptTensors", "CheckpointInputs"]


class _Keep(torch.autograd.Function):
    """Makes a node that saves tensors."""

    # Not what `watched_entrances` puts into its place: no placed tensor comes here.
    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("this node stands in no graph")


class _Begin(torch.autograd.Function):
    """Makes a tensor that requires a gradient and is neither a leaf nor a view."""

    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


@final
class KeptTensors:
    """Detached tensors saved by autograd."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # The output of the node, not only the node: torch 2.11 frees the saved tensors of a node once all its outputs
        # are gone.
        self._made: Tensor | None = None
        if tensors:
            with torch.enable_grad():
                self._made = _Keep.apply(_anchor(), [tensor.detach() for tensor in tensors])

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors; raises a RuntimeError if one of them was changed in place."""
        if self._made is None:
            return ()
        node: Any = self._made.grad_fn
        return node.saved_tensors


@final
class CheckpointInputs:
    """Flattened arguments of one call.

    Args:
        leaves: The arguments.
        changed: Positions of arguments that the call changes in place: copies are saved.
        made: Positions of arguments that an earlier call has returned, with their positions among its results.
    """

    def __init__(self, leaves: Sequence[Any], changed: Collection[int], made: Mapping[int, int]) -> None:
        self._made = made
        self._needs_gradient = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        # Code such as attention asks whether two arguments are the same object, so identity is restored.
        first: dict[int, int] = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                first.setdefault(id(leaf), at)
        self._repeated = {at: first[id(leaf)] for at, leaf in enumerate(leaves) if first.get(id(leaf), at) != at}
        self._copied = {self._repeated.get(at, at) for at in changed} - made.keys()
        positions = [at for at in first.values() if at not in made]
        self._positions = positions
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._kept = KeptTensors(
            [leaves[at].detach().clone() if at in self._copied else leaves[at] for at in positions]
        )

    def again(self, results: Sequence[Any]) -> list[Any]:
        """The arguments for another run.

        Args:
            results: Recomputed results of the earlier call.
        """
        leaves: list[Any] = list(self._leaves)
        for position, tensor in zip(self._positions, self._kept.tensors(), strict=True):
            leaves[position] = tensor.clone() if position in self._copied else tensor
        for position, number in self._made.items():
            leaves[position] = results[number]
        for position, needs_gradient in enumerate(self._needs_gradient):
            if position in self._repeated:
                leaves[position] = leaves[self._repeated[position]]
            elif needs_gradient:
                leaves[position] = _begin(leaves[position])
            elif isinstance(leaves[position], Tensor):
                leaves[position] = leaves[position].detach()
        return leaves


def _begin(tensor: Tensor) -> Tensor:
    with torch.enable_grad():
        return _Begin.apply(_anchor(), tensor.detach)


def _anchor() -> Tensor:
    """Input that makes autograd create a node; on the CPU, where that starts no kernel."""
    return torch.zeros((), requires_grad=True, device="cpu")
