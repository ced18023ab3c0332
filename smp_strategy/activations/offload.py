"""Puts what units keep for backward into host memory until backward comes near.

Around a call of a unit autograd's hooks for saved tensors are set. When the call returns, the copies of what it has
saved begin, beside the computation of the next call. A few calls later the device's memory is free: the computation
waits for a copy if it must, the host does not.

**When things come back** is known from the plan: a stage does its actions one after the other, so before each of them
copies begin for those that are at most *horizon* actions away. What is needed within the horizon anyway does not go out
at all: on the last stage of a pipeline, forward and backward of a microbatch follow each other. Where there is one
stage, or no plan, calls of units are counted and not actions: backward passes those of a microbatch in reverse order,
so when it arrives at one, those before it are expected. The last ones do not go out where backward follows at once; how
many calls a microbatch has is known from the one before.

**What goes out first**: of the calls that wait for their copies the one that is needed last.

What is read before it was expected is loaded then and there; that is slow (``num_late`` counts it), and right.
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

from smp_strategy.activations.offload_stats import OffloadStats
from smp_strategy.activations.offload_tensors import OffloadedTensor, OffloadedTensors, Saved, storages_of
from smp_strategy.distributed.host_copies import HostCopies, StreamEvent
from smp_strategy.distributed.pinned_pool import PinnedPool
from smp_strategy.model.trace.func_transforms import without_transforms
from smp_strategy.model.trace.tensor_spec import storage_of

__all__ = ["Offload", "ReadBack"]

# Calls whose copies are under way at once, and calls that wait for that. The tensors of all of them are on the device.
MOST_LEAVING = 2
MOST_WAITING = 1

_WITHOUT_OFFLOAD = "Leave it out: name the units to be offloaded in `activation_checkpointing`."

Place = tuple[int, int]
"""A microbatch and its segment."""


@final
@dataclass(eq=False)
class _OffloadedCall:
    """A call of a unit, and what it has saved."""

    place: Place
    number: int
    """Among the calls of its microbatch."""
    is_near: bool
    """Whether backward needs it so soon that nothing goes out."""
    module: nn.Module | None
    """The unit."""
    parcels: list[weakref.ref[OffloadedTensor]] = field(default_factory=list)

    @cached_property
    def weights(self) -> set[int]:
        """Storages of what the unit computes with just now: perhaps copies of its weights, in another dtype."""
        module = self.module
        return set() if module is None else storages_of(itertools.chain(module.parameters(), module.buffers()))

    def living(self) -> list[OffloadedTensor]:
        """What is still needed, each once."""
        found = (reference() for reference in self.parcels)
        return list(dict.fromkeys(parcel for parcel in found if parcel is not None))


class _Waiting(NamedTuple):
    needed: tuple[int, int]
    """When backward needs it: the higher the later."""
    call: _OffloadedCall
    computed: StreamEvent


class _Leaving(NamedTuple):
    parcels: list[OffloadedTensor]
    done: StreamEvent


@final
class ReadBack:
    """What autograd calls to read a tensor.

    Attributes:
        can_repeat: whether it may do so several times.
    """

    def __init__(self, read: Callable[[Saved], Tensor], outer: Callable[[Any], Tensor] | None) -> None:
        self.can_repeat = outer is None
        self._read = read
        self._outer = outer

    def __call__(self, saved: Any) -> Tensor:
        """The tensor that was saved."""
        if isinstance(saved, Saved):
            return self._read(saved)
        assert self._outer is not None
        return self._outer(saved)


@final
class Offload:
    """See the module docstring. One object lasts for all steps of a stage.

    Args:
        copies: between the device and the host.
        horizon: how many actions, or calls of units, ahead of its use something is loaded.
        min_bytes: storages that are smaller stay.
        weights: what is on the device anyway.

    Attributes:
        traffic: of the latest step.
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
        self._uses: Mapping[Place, int] | None = None
        self._position = -1
        # Where the microbatch is that runs just now, if one does.
        self._place: Place | None = None
        # With a plan: the places that backward passes beyond the horizon, the next one first.
        self._ahead: deque[Place] = deque()
        self._calls: dict[int, list[_OffloadedCall]] = {}
        # Of the last microbatch whose backward has begun.
        self._num_calls: int | None = None
        self._arrived: _OffloadedCall | None = None
        self._waiting: list[_Waiting] = []
        self._leaving: deque[_Leaving] = deque()

    # What the runtime tells

    @contextmanager
    def step(
        self, uses: Mapping[Place, int] | None, *, backward_follows: bool = False, batch: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """A step with backward runs in here.

        Args:
            uses: at which position of the plan backward passes which segment of which microbatch; ``None``: calls are
                counted.
            backward_follows: then, whether a microbatch's backward follows its forward at once.
            batch: tensors that are on the device during the whole step.
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
        """The action at this position of the plan is about to begin."""
        self._position = position
        while self._uses is not None and self._ahead and self._uses[self._ahead[0]] <= position + self._horizon:
            place = self._ahead.popleft()
            for call in reversed(self._calls.get(place[0], ())):
                if call.place == place:
                    self._expect(call)
        self._go_on()

    def enter(self, place: Place | None) -> None:
        """A microbatch goes on with a segment, or pauses."""
        self._place = place

    def begin_backward(self, microbatch: int) -> None:
        """Backward of a microbatch is about to begin, or to go on."""
        if self._is_in_step and self._uses is None:
            self._num_calls = len(self._calls.get(microbatch, ()))
            self._expect_before(microbatch, self._num_calls)

    def leave_plan(self) -> None:
        """A microbatch takes another path: from now on calls are counted."""
        self._uses, self._backward_follows = None, False

    # Calls

    def around(self, function: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
        """What to call instead of ``function``, which runs a unit, ``module``."""
        return functools.partial(self._run, function, module)

    def _run(self, function: Callable[..., Any], module: nn.Module | None, /, *args: Any, **kwargs: Any) -> Any:
        place = self._place
        if not self._is_in_step or place is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        calls = self._calls.setdefault(place[0], [])
        call = _OffloadedCall(place, len(calls), self._is_near(place, len(calls)), module)
        calls.append(call)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        keep = functools.partial(self._keep, call, None if outer is None else outer[0])
        read = ReadBack(self._read, None if outer is None else outer[1])
        unit, why = type(module).__name__, "whose activations are offloaded"
        with without_transforms(unit, why, _WITHOUT_OFFLOAD), saved_tensors_hooks(keep, read):
            result = function(*args, **kwargs)
        if call.living():
            self._waiting.append(_Waiting(self._needed(call), call, self._copies.now()))
        self._go_on()
        return result

    def _is_near(self, place: Place, number: int) -> bool:
        """Whether backward needs a call so soon that what it saves stays."""
        if self._uses is not None:
            return place in self._uses and self._uses[place] <= self._position + self._horizon
        if self._num_calls is None or not self._backward_follows:
            return False
        return number >= self._num_calls - self._horizon

    def _needed(self, call: _OffloadedCall) -> tuple[int, int]:
        use = call.place[0] if self._uses is None else self._uses.get(call.place, 0)
        return use, -call.number

    def _keep(self, call: _OffloadedCall, outer: Callable[[Tensor], Any] | None, tensor: Tensor) -> Any:
        """Autograd saves ``tensor``. What does not travel goes where it would go without these hooks."""
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
                self._expect_before(saved.by.place[0], saved.by.number)
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
        """Let memory be free again where copies are done, and begin others."""
        self._let_go_of_what_is_done()
        while self._waiting and (len(self._leaving) < MOST_LEAVING or len(self._waiting) > MOST_WAITING):
            if len(self._leaving) >= MOST_LEAVING:
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
        """Of what has left first; on the device, what is computed from now on may get its memory."""
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
