"""Backward tracking: the calls of units that a running backward pass needs now, and those that it has finished.

A backward *arrives* at a call when the gradient of one of its results exists. Then the node that made the result is
about to run, and a prehook of the node tells (results are not wrapped, so they can be changed in place and be
arguments). Results that are invisible, in an attribute or an object, do not tell; their saved weights do when they are
read (:func:`weights_guarded`).

It is *through* with a call when it arrives at an earlier one. Autograd runs, of the nodes that are ready, the one with
the highest number, and a node is made after those that it passes gradients to. Suppose that a node of a later call is
still to run when one of an earlier call does. Then so is a node above it that could run now, and its number is higher
still: a contradiction. Numbers are counted per thread, so calls are compared only if they have the same *token*, which
stands for one thread's work. When a backward ends, it is through with the calls that it arrived at last.

Each ``backward()`` is tracked by itself: the second one through the same graph, one that ends early (a segment of a
pipeline), one within another (reentrant checkpoints). Calls that it has not arrived at may be wanted by the next one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smp_strategy.distributed.torch_private import (
    after_backward,
    current_backward,
    is_in_backward,
    outer_saved_tensor_hooks,
)
from smp_strategy.errors import UnsupportedError, changed_in_place
from smp_strategy.model.compiled_code import leave_uncompiled

__all__ = ["BackwardTracker", "TrackedCall", "is_in", "weights_guarded"]


_Node = Any
"""Node of autograd's graph."""


@final
class _Thread:
    """Calls of one token."""

    def __init__(self) -> None:
        self.next_number = 0
        # Number of calls of each unit that wait for a backward, or for its end.
        self.awaited: Counter[int] = Counter()


@final
class TrackedCall:
    """Call of a unit that a backward may arrive at.

    Attributes:
        unit: Number of the unit.
    """

    __slots__ = ("is_active", "is_awaited", "number", "thread", "unit")

    def __init__(self, unit: int, thread: _Thread) -> None:
        self.unit = unit
        self.thread = thread
        self.number = thread.next_number
        thread.next_number += 1
        self.is_awaited = False
        self.is_active = False
        """Whether a backward has arrived here and is not through."""

    def await_backward(self) -> None:
        """Keep the unit from counting as done before this call is."""
        if not self.is_awaited:
            self.is_awaited = True
            self.thread.awaited[self.unit] += 1


@final
class BackwardTracker:
    """Tells when running backward passes need units, and when they are through with them.

    Args:
        claim: Called when a backward needs a unit.
        release: Called when it is through with that call of the unit.
        done: Called after that, if none of the unit's calls with that token waits for a backward.
        keeps_weights: Whether weights stay when they are released.
    """

    def __init__(
        self,
        *,
        claim: Callable[[int], None],
        release: Callable[[int], None],
        done: Callable[[int], None],
        keeps_weights: bool,
    ) -> None:
        self._keeps_weights = keeps_weights
        self._claim = claim
        self._release = release
        self._done = done
        self._threads: dict[object, _Thread] = {}
        # By autograd's number of the backward: calls that it has arrived at and is not through with.
        self._active: dict[int, list[TrackedCall]] = {}

    def begin(self, unit: int, token: object) -> TrackedCall:
        return TrackedCall(unit, self._threads.setdefault(token, _Thread()))

    def watch(self, call: TrackedCall, results: Iterable[Tensor], made_before: int) -> None:
        """Watch the ``results`` of a call; nodes with numbers below ``made_before`` are older than the call."""
        found: set[_Node | None] = set()
        for tensor in results:
            if tensor.requires_grad:
                found.add(tensor.grad_fn)
                if tensor._is_view():
                    # A view that is changed in place gets another node; that of what it is a view of stays.
                    assert tensor._base is not None
                    found.add(tensor._base.grad_fn)
        nodes = [node for node in found if node is not None and node._sequence_nr() >= made_before]
        for node in nodes:
            node.register_prehook(partial(self._tell, call))
        # A call that is repeated in backward may serve to save tensors only, and none arrives there.
        if nodes and not is_in_backward():
            call.await_backward()

    def arrive(self, call: TrackedCall) -> None:
        """Note that a backward needs the unit of ``call`` from now on, and is through with the later calls."""
        if call.is_active:
            return
        if torch.is_grad_enabled() and not self._keeps_weights:
            raise UnsupportedError(
                "A backward with `create_graph=True` goes through a unit whose weights are spread over ranks and "
                "gathered for each use. What it saves would read weights that are gone. Set `sdp_gather=step`, or "
                "compute such gradients inside a unit."
            )
        backward = current_backward()
        if backward not in self._active:
            self._active[backward] = []
            after_backward(partial(self._end, backward))
        later = self._take_later(call, backward)
        call.await_backward()
        call.is_active = True
        self._active[backward].append(call)
        # Before anything is reduced: this backward waits for the weights, and nobody for the reductions.
        self._claim(call.unit)
        self._tell_done(later)

    def close(self) -> None:
        """Forget all calls so far: no backward is under way, and one that failed may have left claims."""
        for calls in self._active.values():
            for call in calls:
                self._leave(call)
        self._active.clear()
        self._threads.clear()

    def _tell(self, call: TrackedCall, _: object) -> None:
        self.arrive(call)

    def _take_later(self, call: TrackedCall, backward: int) -> list[TrackedCall]:
        """Remove the calls that a backward is through with when it arrives at ``call``."""
        found = []
        for other_backward, active in self._active.items():
            # A backward within another belongs to a node that stands where the calls that it repeats once stood.
            is_within = other_backward != backward
            later = [it for it in active if it.thread is call.thread and (is_within or it.number > call.number)]
            for other in later:
                active.remove(other)
                self._leave(other)
            found += later
        return found

    def _leave(self, call: TrackedCall) -> None:
        call.is_active = call.is_awaited = False
        call.thread.awaited[call.unit] -= 1
        self._release(call.unit)

    def _tell_done(self, calls: Sequence[TrackedCall]) -> None:
        for call in sorted(calls, key=lambda call: -call.number):
            if not call.thread.awaited[call.unit]:
                self._done(call.unit)

    def _end(self, backward: int) -> None:
        calls = self._active.pop(backward)
        for call in calls:
            self._leave(call)
        self._tell_done(calls)


# --- saved weights ---------------------------------------------------------------------------------------------------
# Saved-tensor hooks for weights of sharded units: backward gathers the weights before it reads them.
#
# Autograd saves views of weights, and their memory comes and goes. The code that frees it must know when backward will
# read it, and can be mistaken: a unit may leave a result in an attribute, or in an object that cannot be inspected.
# Freed memory must never be read. So tensors that a unit saves pass through here: those in the memory of its weights
# are handed to autograd in a form that asks for the weights when it is opened.
#
# This replaces autograd's own check that a saved tensor was not changed in place, which is done only for tensors that
# were saved without hooks. Hooks of the user or of a checkpoint that are set inside the unit are nearer and come before
# these; hooks outside of it get all tensors except the weights, as they would without these.


_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_Saved = tuple[Any, int, Literal["weight", "own", "outer"]]


def weights_guarded(memory: Sequence[range], needed: Callable[[], None]) -> saved_tensors_hooks:
    """Context in which saved tensors in ``memory`` are read only after a call of ``needed``.

    Args:
        memory: Address ranges of the weights.
        needed: Makes sure that the weights are there; called before each read.
    """
    outer: _Hooks | None = outer_saved_tensor_hooks()

    def save(tensor: Tensor) -> _Saved:
        if is_in(memory, tensor):
            return tensor, tensor._version, "weight"
        if outer is not None:
            return outer[0](tensor), 0, "outer"
        # A result must not hold the node that holds it.
        return tensor if tensor.grad_fn is None else tensor.detach(), tensor._version, "own"

    def read(saved: _Saved) -> Tensor:
        content, version, kind = saved
        if kind == "outer":
            assert outer is not None
            return outer[1](content)
        if kind == "weight":
            needed()
        if content._version != version:
            raise changed_in_place(content.shape, content._version, version)
        return content

    leave_uncompiled(save, read)
    return saved_tensors_hooks(save, read)


def is_in(memory: Sequence[range], tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse, or of another kind without plain memory
        return False
    # Called for each tensor that is saved, and `any` takes longer.
    for addresses in memory:  # noqa: SIM110
        if address in addresses:
            return True
    return False
