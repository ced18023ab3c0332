"""The arguments of a call that is run once more in backward.

Tensors among them are kept by autograd itself, in a node of their own that stands in no graph: so hooks on saved
tensors see them (they may put them into host memory), a change in place since the call is an error, and they are freed
with the graph that leads to them. A tensor that an earlier call of the group has returned is not kept, for that call is
run again, too (:mod:`smp_strategy.activations.checkpoint_groups`).

Each run gets tensors without history, which need a gradient where those of the call did and which it may change in
place as the call may have: they are no leaves. What was one tensor among the arguments is one again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["KeptTensors", "CheckpointInputs"]


class _Keep(torch.autograd.Function):
    """Makes a node that keeps tensors."""

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
    """Makes a tensor that needs a gradient and is neither a leaf nor a view."""

    apply = vars(torch.autograd.Function)["apply"]

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


@final
class KeptTensors:
    """Tensors in the hands of autograd, without their history."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # What the node has returned, and not the node alone: torch 2.11 frees what a node keeps when nothing that it
        # has returned is left.
        self._made: Tensor | None = None
        if tensors:
            with torch.enable_grad():
                self._made = _Keep.apply(_anchor(), [tensor.detach() for tensor in tensors])

    def tensors(self) -> tuple[Tensor, ...]:
        """They; raises a RuntimeError if one of them was changed in place."""
        if self._made is None:
            return ()
        node: Any = self._made.grad_fn
        return node.saved_tensors


@final
class CheckpointInputs:
    """The flattened arguments of one call.

    Args:
        leaves: the arguments.
        changed: positions of those that the call changes in place: copies are kept.
        made: positions of those that an earlier call has made, with the position among its results.
    """

    def __init__(self, leaves: Sequence[Any], changed: Collection[int], made: Mapping[int, int]) -> None:
        self._made = made
        self._needs_gradient = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        # Code may ask whether two arguments are the same object, as attentions do: they are again.
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
        """The arguments of another run.

        Args:
            results: of the earlier call, made again.
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
    """What makes autograd make a node; on the processor, where that starts no kernel."""
    return torch.zeros((), requires_grad=True, device="cpu")
