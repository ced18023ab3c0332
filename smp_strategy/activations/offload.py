"""Activation offload: saved tensors move to host memory and return before their backward.

Hooks for saved tensors surround each call of a unit. When the call returns, copies of its saved tensors begin, beside
the computation of the next call. A few calls later the device memory is free: computation waits for a copy if it must,
the host does not.

**Prefetch** follows the plan: a stage runs its actions in order, so before each action copies begin for those at most
*horizon* actions away. Tensors that are needed within the horizon anyway are not offloaded: on the last stage of a
pipeline, forward and backward of a microbatch follow each other. With one stage, or without a plan, calls of units are
counted instead of actions: backward passes the calls of a microbatch in reverse order, so when it arrives at one, those
before it are expected. The last calls are not offloaded where backward follows at once; the number of calls is known
from the previous microbatch.

**Order of copies to the host**: of the waiting calls, the one whose backward comes last.

A tensor that is read before it was expected is loaded on demand: slow (``num_late`` counts it), but correct.
"""

import functools
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from smp_strategy.activations.offload_tensors import OffloadedTensor, OffloadedTensors, Saved, storages_of
from smp_strategy.activations.policy import OffloadStats
from smp_strategy.distributed.host_copies import HostCopies, StreamEvent
from smp_strategy.distributed.pinned_pool import PinnedPool
from smp_strategy.distributed.torch_private import outer_saved_tensor_hooks
from smp_strategy.model.trace.saved_tensors import without_transforms
from smp_strategy.model.trace.tensor_spec import storage_of

__all__ = ["Offload", "ReadBack"]

# Calls whose copies are under way at once, and calls that wait for their turn. Both still occupy device memory.
MOST_LEAVING = 2
MOST_WAITING = 1

_WITHOUT_OFFLOAD = "Leave it out: name the units to be offloaded in `activation_checkpointing`."

MicrobatchSegment = tuple[int, int]
"""Number of a microbatch, and of a segment in it."""


@final
@dataclass(eq=False)
class _OffloadedCall:
    """A call of a unit, and its offloaded tensors."""

    segment: MicrobatchSegment
    number: int
    """Index among the calls of its microbatch."""
    is_near: bool
    """Whether backward comes so soon that nothing is offloaded."""
    module: nn.Module | None
    """The unit."""
    parcels: list[weakref.ref[OffloadedTensor]] = field(default_factory=list)

    @cached_property
    def weights(self) -> set[int]:
        """Storages that the unit computes with in this call: perhaps copies of its weights in another dtype."""
        module = self.module
        return set() if module is None else storages_of(itertools.chain(module.parameters(), module.buffers()))

    def living(self) -> list[OffloadedTensor]:
        """Offloaded tensors that are still needed, each once."""
        found = (reference() for reference in self.parcels)
        return list(dict.fromkeys(parcel for parcel in found if parcel is not None))


class _Waiting(NamedTuple):
    needed: tuple[int, int]
    """Position of its backward: higher is later."""
    call: _OffloadedCall
    computed: StreamEvent


class _Leaving(NamedTuple):
    parcels: list[OffloadedTensor]
    done: StreamEvent


@final
class ReadBack:
    """Unpack hook of autograd.

    Attributes:
        can_repeat: Whether a tensor may be unpacked several times.
    """

    def __init__(self, read: Callable[[Saved], Tensor], outer: Callable[[Any], Tensor] | None) -> None:
        self.can_repeat = outer is None
        self._read = read
        self._outer = outer

    def __call__(self, saved: Any) -> Tensor:
        if isinstance(saved, Saved):
            return self._read(saved)
        assert self._outer is not None
        return self._outer(saved)


@final
class Offload:
    """Offload of one stage; lasts for all steps.

    Args:
        copies: Copies between the device and the host.
        horizon: Number of actions, or calls of units, by which a load precedes its use.
        min_bytes: Storages smaller than this stay on the device.
        weights: Tensors that are on the device anyway.

    Attributes:
        traffic: Statistics of the latest step.
    """

    def __init__(
        self,
        copies: HostCopies,
        *,
        horizon: int = 1,
        min_bytes: int = 1,
        weights: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self.traffic = OffloadStats()
        self._copies = copies
        self._horizon = horizon
        self._weights = weights
        self._memory = PinnedPool(copies.memory)
        self._parcels = OffloadedTensors(copies, min_bytes)
        self._is_in_step = self._backward_follows = False
        self._uses: Mapping[MicrobatchSegment, int] | None = None
        self._position = -1
        # Position of the running microbatch, if one runs.
        self._segment: MicrobatchSegment | None = None
        # With a plan: segments whose backward lies beyond the horizon, the next one first.
        self._ahead: deque[MicrobatchSegment] = deque()
        self._calls: dict[int, list[_OffloadedCall]] = {}
        # Of the last microbatch whose backward has begun.
        self._num_calls: int | None = None
        self._arrived: _OffloadedCall | None = None
        self._waiting: list[_Waiting] = []
        self._leaving: deque[_Leaving] = deque()

    # Notifications from the runtime

    @contextmanager
    def step(
        self,
        uses: Mapping[MicrobatchSegment, int] | None,
        *,
        backward_follows: bool = False,
        batch: Iterable[Tensor] = (),
    ) -> Iterator[None]:
        """Context of one step with backward.

        Args:
            uses: Position in the plan of each microbatch's backward through each segment; ``None``: calls are
                counted.
            backward_follows: In that case, whether a microbatch's backward follows its forward at once.
            batch: Tensors that are on the device during the whole step.
        """
        self.traffic = OffloadStats()
        self._memory.most_leased = self._memory.leased
        self._parcels.keep_here(itertools.chain(self._weights(), batch))
        self._is_in_step = True
        self._uses, self._backward_follows = uses, backward_follows
        self._position = -1
        self._ahead = deque(() if uses is None else sorted(uses, key=uses.__getitem__))
        try:
            yield
        finally:
            self._is_in_step = False
            self._end()

    def reach(self, position: int) -> None:
        """The action at ``position`` of the plan is about to begin."""
        self._position = position
        while self._uses is not None and self._ahead and self._uses[self._ahead[0]] <= position + self._horizon:
            segment = self._ahead.popleft()
            # Backward passes the calls in reverse order, so loads begin in that order, too.
            for call in reversed(self._calls.get(segment[0], ())):
                if call.segment == segment:
                    self._expect(call)
        self._go_on()

    def enter(self, segment: MicrobatchSegment | None) -> None:
        """A microbatch resumes with ``segment``, or pauses (``None``)."""
        self._segment = segment

    def begin_backward(self, microbatch: int) -> None:
        """Backward of a microbatch is about to begin or to resume."""
        if self._is_in_step and self._uses is None:
            self._num_calls = len(self._calls.get(microbatch, ()))
            self._expect_before(microbatch, self._num_calls)

    def leave_plan(self) -> None:
        """A microbatch has left the plan: calls are counted from now on."""
        self._uses, self._backward_follows = None, False

    # Calls

    def around(self, function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
        """Wrapper of ``function``, which runs the unit ``module``."""
        return functools.partial(self._run, function, module)

    def _run(self, function: Callable[..., Any], module: nn.Module | None, /, *args: Any, **kwargs: Any) -> Any:
        segment = self._segment
        if not self._is_in_step or segment is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        calls = self._calls.setdefault(segment[0], [])
        call = _OffloadedCall(segment, len(calls), self._is_near(segment, len(calls)), module)
        calls.append(call)
        outer = outer_saved_tensor_hooks()
        keep = functools.partial(self._keep, call, None if outer is None else outer[0])
        read = ReadBack(self._read, None if outer is None else outer[1])
        unit, why = type(module).__name__, "whose activations are offloaded"
        with without_transforms(unit, why, _WITHOUT_OFFLOAD), saved_tensors_hooks(keep, read):
            result = function(*args, **kwargs)
        if call.living():
            self._waiting.append(_Waiting(self._needed(call), call, self._copies.now()))
        self._go_on()
        return result

    def _is_near(self, segment: MicrobatchSegment, number: int) -> bool:
        """Whether backward comes so soon that the call's saved tensors stay."""
        if self._uses is not None:
            return segment in self._uses and self._uses[segment] <= self._position + self._horizon
        if self._num_calls is None or not self._backward_follows:
            return False
        return number >= self._num_calls - self._horizon

    def _needed(self, call: _OffloadedCall) -> tuple[int, int]:
        use = call.segment[0] if self._uses is None else self._uses.get(call.segment, 0)
        return use, -call.number

    def _keep(self, call: _OffloadedCall, outer: Callable[[Tensor], Any] | None, tensor: Tensor) -> Any:
        """Pack hook of autograd. Tensors that stay on the device go to the outer hooks."""
        travels = not call.is_near and self._parcels.travels(tensor) and storage_of(tensor) not in call.weights
        if not travels and outer is not None:
            return outer(tensor)
        saved = Saved(tensor, call)
        if travels:
            call.parcels.append(weakref.ref(self._parcels.pack(saved)))
        return saved

    def _read(self, saved: Saved) -> Tensor:
        if saved.by is not self._arrived:
            self._arrived = saved.by
            if self._is_in_step and self._uses is None:
                self._expect_before(saved.by.segment[0], saved.by.number)
        if saved.tensor is None and saved.parcel is not None and self._load(saved.parcel):
            self.traffic = replace(self.traffic, num_late=self.traffic.num_late + 1)
        return saved.read()

    def _expect_before(self, microbatch: int, number: int) -> None:
        calls = self._calls.get(microbatch, [])
        for call in reversed(calls[max(number - self._horizon, 0) : number]):
            self._expect(call)

    # Copies

    def _expect(self, call: _OffloadedCall) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting.call is not call]
        for parcel in reversed(call.living()):
            self._load(parcel)

    def _load(self, parcel: OffloadedTensor) -> int:
        nbytes = parcel.expect()
        if nbytes:
            self.traffic = replace(self.traffic, bytes_in=self.traffic.bytes_in + nbytes)
        return nbytes

    def _go_on(self) -> None:
        """Free device memory of finished copies, and begin others."""
        self._let_go_of_what_is_done()
        while self._waiting and (len(self._leaving) < MOST_LEAVING or len(self._waiting) > MOST_WAITING):
            if len(self._leaving) >= MOST_LEAVING:
                # The link is slower than the computation. Memory stays bounded because the device waits here.
                self._let_go()
                self.traffic = replace(self.traffic, num_held_up=self.traffic.num_held_up + 1)
            last = max(self._waiting, key=operator.attrgetter("needed"))
            self._waiting.remove(last)
            self._send(last)
            self._let_go_of_what_is_done()

    def _let_go_of_what_is_done(self) -> None:
        while self._leaving and self._leaving[0].done.query():
            self._let_go()

    def _send(self, waiting: _Waiting) -> None:
        parcels, done = [], None
        for parcel in waiting.call.living():
            if not parcel.was_sent:
                moment = parcel.send(self._memory, waiting.computed)
                if moment is not None:
                    parcels.append(parcel)
                    done = moment
        if done is not None:
            nbytes = sum(parcel.nbytes for parcel in parcels)
            self.traffic = replace(self.traffic, bytes_out=self.traffic.bytes_out + nbytes)
            self._leaving.append(_Leaving(parcels, done))

    def _let_go(self) -> None:
        """Release the oldest copy; what is computed from now on may get its device memory."""
        parcels, done = self._leaving.popleft()
        self._copies.wait(done)
        for parcel in parcels:
            parcel.let_go()

    def _end(self) -> None:
        while self._leaving:
            self._let_go()
        self._waiting.clear()
        self._calls.clear()
        self._arrived = None
        self.traffic = replace(self.traffic, most_on_host=self._memory.most_leased)
        self._memory.trim()
