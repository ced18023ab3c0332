"""Activation checkpointing of one call: it keeps its inputs only, and is recomputed in backward.

While the call runs, autograd saves empty *slots* instead of tensors. When backward opens the first slot, the call runs
again under its original conditions, and the tensors that autograd saves this time fill the slots in the same order. The
second run stops as soon as the last slot that backward may still open is filled. Gradients pass through the graph of
the first run only, so hooks fire once, weights get one gradient, and a split backward, a repeated backward, or a
backward inside another one finds what it would have found without checkpointing.

A slot keeps its tensor until autograd drops the slot, which it does right after use. With a retained graph, slots are
emptied when the backward is over, and the next backward recomputes the call.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smp_strategy.activations.selective import Products
from smp_strategy.distributed.torch_private import after_backward, is_in_backward
from smp_strategy.errors import UnsupportedError, changed_in_place
from smp_strategy.model.trace.pytree import flatten_result, unflatten_call
from smp_strategy.model.trace.saved_tensors import without_transforms

__all__ = ["Recomputed", "CheckpointInputs", "CheckpointGroups"]


# --- saved inputs ----------------------------------------------------------------------------------------------------
# Saved inputs of a checkpointed call.
#
# Autograd itself saves the input tensors, in a node that belongs to no graph: hooks on saved tensors see them (and may
# offload them), an in-place change is detected, and they are freed with the graph that leads to them. A tensor returned
# by an earlier call of the checkpoint group is not saved, because that call is recomputed too.
#
# Each run gets tensors without history. They require gradients where those of the call did, and are not leaves, so the
# run may change them in place as the call may have. Arguments that were one tensor are one tensor again.


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


# [Note: recomputation slots]
#
# The first run hands autograd a numbered slot for each tensor it saves; the second run saves the same tensors in the
# same order, so the n-th tensor of the second run belongs into slot n. Three things keep the runs in step:
#
# 1. The second run starts from the same state (`ModuleSnapshot`, autocast, generators), so it takes the same path. A
#    tensor of another dtype, shape or device, or too few tensors, is an error.
# 2. Slots are weakly referenced. Autograd drops those of branches that need no gradient and those that backward has
#    used; `wanted` are the others, and the run stops (`_Enough`) at the last of them. Hence `_Enough` is raised inside
#    the user's code, at any operation, and whatever surrounds that code must be exception-safe.
# 3. The graph of the second run is thrown away: tensors are detached as they are saved.
#
# In a checkpoint group the results of one second run are arguments of the next, so only the last call of the group may
# stop early.


# --- recomputation ---------------------------------------------------------------------------------------------------


class _Enough(BaseException):
    """Stops the second run: all slots that backward may open are filled.

    Not an ``Exception``, because the user's ``except Exception`` must not catch it.
    """


class _SavedSlot:
    """Placeholder for a tensor that autograd saves."""

    __slots__ = ("__weakref__", "_content", "_kind", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._kind = _kind(tensor)
        self._content: Tensor | None = None
        self._version = 0

    @property
    def is_filled(self) -> bool:
        return self._content is not None

    def fill(self, tensor: Tensor, name: str) -> None:
        if _kind(tensor) != self._kind:
            raise _is_different(name, f"a tensor that was {_shown(self._kind)} is {_shown(_kind(tensor))} then")
        # A result must not hold the node that holds it.
        self._content = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def take(self) -> Tensor:
        content = self._content
        assert content is not None
        if content._version != self._version:
            raise changed_in_place(content.shape, content._version, self._version)
        return content

    def clear(self) -> None:
        self._content = None


@final
class Recomputed:
    """A checkpointed call.

    Args:
        name: Name of the unit, for messages.
        function: Runs the unit.
        structure: Tree structure of its arguments.
        inputs: Its arguments.
        as_before: Opens a context that restores everything else that the call depends on.
        earlier: Previous call of the checkpoint group, whose results are among the arguments.
        products: Recorder of kept products; ``None``: everything is recomputed.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        structure: Any,
        inputs: CheckpointInputs,
        as_before: Callable[[], AbstractContextManager[Any]],
        *,
        earlier: "Recomputed | None" = None,
        products: Products | None = None,
    ) -> None:
        self.earlier = earlier
        self._name = name
        self._function = function
        self._structure = structure
        self._inputs = inputs
        self._as_before = as_before
        self._products = products
        self._slots: list[weakref.ref[_SavedSlot]] = []

    def call(self, args: Any, kwargs: Any) -> Any:
        """Run the call with its original arguments."""
        remedy = "Leave it out of `activation_checkpointing`."
        with (
            without_transforms(f"`{self._name}`", "that is computed again in backward", remedy),
            saved_tensors_hooks(self._note, self._open),
        ):
            if self._products is None:
                return self._function(*args, **kwargs)
            with self._products.recording:
                result = self._function(*args, **kwargs)
        self._products.settle(flatten_result(result)[0])
        return result

    def _note(self, tensor: Tensor) -> _SavedSlot:
        slot = _SavedSlot(tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def _open(self, slot: _SavedSlot) -> Tensor:
        if slot.is_filled:
            return slot.take()
        group = [self]
        while group[-1].earlier is not None:
            group.append(group[-1].earlier)
        results: Sequence[Any] = ()
        while group:
            call = group.pop()
            results = call._run_again(results, is_last=not group)
        content = slot.take()
        if not is_in_backward():
            self._clear()  # the graph is only inspected; no backward will use this
        return content

    def _run_again(self, results: Sequence[Any], *, is_last: bool) -> Sequence[Any]:
        """Recompute the call and fill its slots.

        Args:
            results: Recomputed results of the previous call of the group.
            is_last: Whether no later call needs the results of this one.
        """
        slots = [each() for each in self._slots]
        wanted = [number for number, slot in enumerate(slots) if slot is not None and not slot.is_filled]
        if is_in_backward():
            # When the whole backward is over: a retained graph must not keep the recomputed activations.
            after_backward(_when_alive(self))
        last = wanted[-1] if wanted else -1
        number = -1

        def keep(tensor: Tensor) -> Tensor:
            nonlocal number
            number += 1
            slot = slots[number] if number <= last else None
            if slot is not None and not slot.is_filled:
                slot.fill(tensor, self._name)
            if number >= last and is_last:
                raise _Enough
            return tensor if tensor.grad_fn is None else tensor.detach()  # must not hold the node that holds it

        try:
            args, kwargs = unflatten_call(self._inputs.again(results), self._structure)
            products = nullcontext() if self._products is None else self._products.again()
            with self._as_before(), torch.enable_grad(), saved_tensors_hooks(keep, _as_it_is), products:
                made = self._function(*args, **kwargs)
        except BaseException:
            # Code that is not Python turns `_Enough` into another exception.
            if not (is_last and number >= last):
                raise
            return ()
        if number < last:
            raise _is_different(self._name, f"backward was to use {last + 1} tensors and {number + 1} were made")
        return flatten_result(made)[0]

    def _clear(self) -> None:
        for each in self._slots:
            slot = each()
            if slot is not None:
                slot.clear()


def _when_alive(call: Recomputed) -> Callable[[], None]:
    """Callback that empties the slots of ``call`` if a graph still holds it."""
    reference = weakref.ref(call)

    def clear() -> None:
        alive = reference()
        if alive is not None:
            alive._clear()

    return clear


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device


def _shown(kind: tuple[Any, ...]) -> str:
    dtype, shape, device = kind
    return f"{dtype} {list(shape)} on {device}"


def _is_different(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"`{name}` is computed again in backward, but does something else then: {what}. What it does may depend on its "
        "arguments, its attributes and random numbers, and on nothing else that changes. Leave it out of "
        "`activation_checkpointing`."
    )


# --- checkpoint groups -----------------------------------------------------------------------------------------------
# Checkpoint groups: consecutive calls that are recomputed together. See [Note: recomputation slots].
#
# A call need not keep an input that the call before it has returned: in backward the earlier call is recomputed first,
# and the tensors that both would have kept are available at once. So a group of N calls keeps only the inputs of its
# first call, and has the activations of all N in memory during their backward.
#
# Two calls belong together if their units are in the same list of modules, they belong to the same microbatch, and a
# tensor that the later one gets is, as an object and unchanged, one that the earlier one has returned. A value from
# another stage, or from code above the units, is another object: a group never crosses stages, and ends where anything
# happens between its units.


class Joined(NamedTuple):
    """Membership of a call in a checkpoint group."""

    earlier: Recomputed | None
    made: dict[int, int]
    """Positions of arguments that the earlier call has returned, with their positions among its results."""
    size: int
    """Number of calls in the group, including this one."""


class _Latest(NamedTuple):
    call: weakref.ref[Recomputed]
    results: list[tuple[int, weakref.ref[Tensor], int]]
    """Positions, tensors, versions."""
    size: int


@final
class CheckpointGroups:
    """Checkpoint groups of a stage. Holds no call and no tensor alive."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, object], _Latest] = {}

    def join(self, unit: str, token: object, leaves: Sequence[Any], most: int | None) -> Joined:
        """The call that a new call follows, if any.

        Args:
            unit: Name of the called unit.
            token: Equal for calls of one microbatch.
            leaves: Flattened arguments.
            most: Maximum number of calls in a group; ``None``: no limit.
        """
        latest = self._latest.get((_list_of(unit), token))
        earlier = None if latest is None else latest.call()
        if latest is None or earlier is None or (most is not None and latest.size >= most):
            return Joined(None, {}, 1)
        made = {}
        for number, reference, version in latest.results:
            tensor = reference()
            if tensor is not None and tensor._version == version:
                made.update({at: number for at, leaf in enumerate(leaves) if leaf is tensor})
        return Joined(earlier, made, latest.size + 1) if made else Joined(None, {}, 1)

    def note(self, unit: str, token: object, call: Recomputed, results: Sequence[Any], size: int) -> None:
        """Record that ``call`` has returned ``results``."""
        tensors = [(at, leaf) for at, leaf in enumerate(results) if isinstance(leaf, Tensor)]
        references = [(at, weakref.ref(leaf), leaf._version) for at, leaf in tensors]
        self._latest[_list_of(unit), token] = _Latest(weakref.ref(call), references, size)


def _list_of(unit: str) -> str:
    return unit.rpartition(".")[0]
