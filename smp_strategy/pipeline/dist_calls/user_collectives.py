"""Collectives of ``torch.distributed`` in the user's step, redirected to the data-parallel replicas.

In a step the default process group means the same stage of all replicas ([Note: collectives mean replicas] below). A
collective of values that exist on one stage only is one operation of the program, on that stage; inside of units, and
with values that every stage has, it is called directly. In a dry run or with a single replica its result is computed
without communication (:mod:`smp_strategy.pipeline.dist_calls.collective_results`).

Outside of steps the functions of torch behave as before, and are watched for deadlocks
(:mod:`smp_strategy.distributed`).
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from smp_strategy.distributed.deadlock import BegunCollective, watch_of
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.dist_calls.collective_results import AS_IF_ALIKE, FUNCTIONAL_AS_IF_ALIKE, ReplicaNumber
from smp_strategy.pipeline.dist_calls.process_counts import counting_replicas
from smp_strategy.pipeline.placed_tensor import Interpreter, PlacedTensor

__all__ = ["ReplicaCollectives", "Replicas", "WatchedCollectives", "replicas_of"]

_MESSAGES = frozenset({"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "__new__", "__init__"})
_OBJECTS = frozenset({"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"})
_MAKERS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group")
# Their ranks are those of the default group, which a group of replicas counts itself.
_ROOTS = {"src": "group_src", "dst": "group_dst", "peer": "group_peer"}
_LISTS = ("tensor_list", "gather_list", "input_list", "scatter_list", "output_tensor_list", "input_tensor_list")

# [Note: collectives mean replicas]
# Code that is written for data-parallel training gathers from "all ranks" and asks for its rank among them. With a
# pipeline most ranks hold other stages of the same samples: gathering from them would count samples twice, or wait for
# ranks that have no such tensor. The ranks that it means are those with the same stage in the other replicas.
#
# * Why not replace the functions in their module: they are reached under many names, too
#   (`from torch.distributed import all_gather`). So the code of the functions themselves is replaced while a model is
#   trained (`_exchange`).
# * The package's own collectives must keep the real groups, which may have the very ranks of the default one. So the
#   caller decides (`_asks_package`): calls of this package do what they always do, calls through its integrations
#   count as the user's.
# * All ranks of a replica group must meet in the same order. Under a plan they do; off the plan microbatches go on as
#   messages arrive, in another order on each replica, so a collective is refused there (`begin_to_improvise`).

# Frames between a call and its replacement.
_BETWEEN = frozenset({__name__, c10d.__name__, "torch.distributed.c10d_logger"})
_PACKAGE = f"{__name__.partition('.')[0]}."
_DOORS = (f"{_PACKAGE}integrations.lightning", f"{_PACKAGE}integrations.accelerate")


@final
@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The ranks that stand for all ranks in a step."""

    rank: int = 0
    """This rank's number among them."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Their process group; ``None`` for a single replica."""
    members: frozenset[int] = frozenset({0})
    """Their global ranks."""
    is_whole: bool = True
    """Whether each of these ranks holds its whole replica."""

    @property
    def place(self) -> ReplicaNumber:
        """This rank's number and the number of replicas."""
        return ReplicaNumber(self.rank, self.size)


def replicas_of(mesh: ProcessMesh) -> Replicas:
    """The ranks with the same stage and the same tensor-parallel rank as this one, in all replicas."""
    return Replicas(
        rank=mesh.dp_rank,
        size=mesh.dp,
        group=mesh.dp_group if mesh.dp > 1 else None,
        members=frozenset(dist.get_process_group_ranks(mesh.dp_group) if mesh.dp > 1 else [mesh.rank]),
        is_whole=mesh.pp == mesh.tp == 1,
    )


class _Exchanged(NamedTuple):
    """A function of torch whose code can be replaced."""

    name: str
    function: Any
    """The innermost function, without decorators, to which all of its names lead."""
    original: FunctionType
    """Copy with the original code."""
    signature: inspect.Signature
    is_functional: bool = False

    @property
    def waits(self) -> bool:
        """Whether all ranks of a group must call it."""
        return not self.is_functional and self.name in AS_IF_ALIKE and self.name not in _MESSAGES


def _entry(owner: Any, name: str, *, is_functional: bool = False) -> _Exchanged:
    function = inspect.unwrap(getattr(owner, name))
    assert isinstance(function, FunctionType)
    assert function.__kwdefaults__ is None
    original = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    signature = inspect.signature(function)
    return _Exchanged(name, function, original, signature, is_functional)


def _entries() -> Iterator[_Exchanged]:
    for name in (*AS_IF_ALIKE, "get_rank", "get_world_size", *_MAKERS):
        if hasattr(c10d, name):
            yield _entry(c10d, name)
    for name in ("__new__", "__init__"):
        yield _entry(dist.P2POp, name)
    for name in FUNCTIONAL_AS_IF_ALIKE:
        if hasattr(functional, name):
            yield _entry(functional, name, is_functional=True)


_ENTRIES = tuple(_entries())


@final
class _Exchange:
    """State of the replacement: the objects that need it, and the open step."""

    def __init__(self) -> None:
        self.users: list[object] = []
        self.opened: list[ReplicaCollectives] = []

    def leave(self, user: object) -> None:
        """Deregister ``user``; the last one restores the functions."""
        if user in self.users:
            self.users.remove(user)
            if not self.users:
                _give_back()

    def outside(self, entry: _Exchanged, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out a call outside of steps, watched: if a rank does not make it, the others are told."""
        # The order of calls in the user's own threads is the user's business.
        is_apart = threading.current_thread() is not threading.main_thread()
        if not entry.waits or is_apart or _asks_package() or not dist.is_initialized():
            return entry.original(*args, **kwargs)
        group = entry.signature.bind(*args, **kwargs).arguments.get("group")
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            return entry.original(*args, **kwargs)
        return _watched(lambda: entry.original(*args, **kwargs), group, f"`{entry.name}`")


def _elsewhere(*args: Any, smp_entry: _Exchanged, smp_exchange: _Exchange, **kwargs: Any) -> Any:
    """Replacement for the code of the functions."""
    # Everything that it needs comes as keyword defaults: the code runs with the globals of torch's module, not these.
    # One look: Ctrl-C may end the step on another thread in between.
    for innermost in smp_exchange.opened[-1:]:
        return innermost.answer(smp_entry, args, kwargs)
    return smp_exchange.outside(smp_entry, args, kwargs)


def _exchange() -> _Exchange:
    """The replacement that is in force, or a new one."""
    # The replaced functions hold it, so this module needs no global.
    under_way = _ENTRIES[0].function.__kwdefaults__
    if under_way is not None:
        return under_way["smp_exchange"]
    exchange = _Exchange()
    for entry in _ENTRIES:
        entry.function.__kwdefaults__ = {"smp_entry": entry, "smp_exchange": exchange}
        entry.function.__code__ = _elsewhere.__code__
    return exchange


def _give_back() -> None:
    for entry in _ENTRIES:
        entry.function.__code__ = entry.original.__code__
        entry.function.__kwdefaults__ = None


def _watched(call: Callable[[], Any], group: dist.ProcessGroup, doing: str) -> Any:
    """Carry out ``call``, a collective of ``group``, watched for ranks that wait in it for ever."""
    meeting = watch_of().begin(group, doing)
    with watch_of().calling(meeting):
        result = call()
    return _Pending(result, meeting) if isinstance(result, dist.Work) else result


@final
class _Pending:
    """Handle of an asynchronous collective; ``wait`` is watched."""

    def __init__(self, work: dist.Work, meeting: BegunCollective) -> None:
        self._work = work
        self._meeting = meeting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with watch_of().calling(self._meeting):
            return self._work.wait(*args, **kwargs)


@final
class _Done:
    """Handle of an asynchronous collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


@final
class WatchedCollectives:
    """Deadlock watch over the collectives of torch that hooks and scripts call, until it is closed."""

    def __init__(self) -> None:
        self._exchange = _exchange()
        self._exchange.users.append(self)

    def close(self) -> None:
        self._exchange.leave(self)


@final
class ReplicaCollectives:
    """Redirects the collectives of steps to the replicas; see [Note: collectives mean replicas]. Unless they meet,
    results are as if the other ranks gave the same values.
    """

    def __init__(
        self,
        replicas: Replicas,
        current: CurrentProgram | None = None,
        *,
        meets: bool = True,
    ) -> None:
        self._replicas = replicas
        self._current = current or CurrentProgram()
        self._meets = meets and replicas.size > 1
        self._is_aside = False
        # Whether this step has communicated, and whether it has left the plan's order.
        self._has_met = self._improvises = False
        # Made once: shape inference remembers calls by the identity of the function.
        self._runs = {id(entry.function): functools.partial(self._run, entry) for entry in _ENTRIES}
        self._exchange = _exchange()
        self._exchange.users.append(self)

    def close(self) -> None:
        """Restore the functions of torch, unless others still need the replacement."""
        self._exchange.leave(self)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context in which code of a step runs."""
        self._has_met = self._improvises = False
        self._exchange.opened.append(self)
        try:
            with counting_replicas(self._replicas.place[1]):
                yield
        finally:
            self._exchange.opened.remove(self)

    @contextmanager
    def aside(self, is_aside: bool = True) -> Iterator[None]:
        """Context in which the default process group means all ranks; with ``False``, the replicas again."""
        before, self._is_aside = self._is_aside, is_aside
        try:
            yield
        finally:
            self._is_aside = before

    def begin_to_improvise(self) -> None:
        """Refuse collectives from now on: microbatches continue in the order of this replica's messages.

        Raises:
            UnsupportedError: the step has already communicated with other replicas.
        """
        self._improvises = True
        if self._has_met:
            self._refuse_improvised("A collective in the step")

    def _refuse_improvised(self, what: str) -> None:
        raise UnsupportedError(
            f"{what} meets the other replicas, but a microbatch takes another path through the step than the schedule "
            "was made for (a branch on values, or on the number of the batch), so that replicas would meet in others' "
            "microbatches. Let the step make the same calls each time, or set `active_microbatches=1`, under which "
            "microbatches run one after the other."
        )

    def answer(self, entry: _Exchanged, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a call in a step; returns its result."""
        if self._is_aside or _asks_package():
            return entry.original(*args, **kwargs)
        if entry.name in _MAKERS:
            raise UnsupportedError(
                f"`{entry.name}` is called in a step, where ranks are numbers of replicas. Make process groups before: "
                "in `setup` or `on_fit_start`, or before the model is prepared."
            )
        given = dict(entry.signature.bind(*args, **kwargs).arguments)
        if entry.name in ("get_rank", "get_world_size"):
            is_default = self._is_default(given.get("group"))
            return self._replicas.place[entry.name == "get_world_size"] if is_default else entry.original(**given)
        program = self._current.interpreter
        is_glue = program is not None and not program.is_in_unit and not program.is_predicting
        if is_glue and any(isinstance(leaf, PlacedTensor) for leaf in flatten((args, kwargs))[0]):
            assert program is not None
            return self._in_program(entry, program, given)
        return self._carry_out(entry, given)

    def _in_program(self, entry: _Exchanged, program: Interpreter, given: dict[str, Any]) -> Any:
        """Carry out a call of the glue with placed tensors, on the stage that holds them."""
        if entry.name in _MESSAGES:
            raise UnsupportedError(
                f"`{entry.name}` in code above the units is given a tensor that is on one stage. Move the exchange "
                "into an autograd Function, or into a module that is a unit."
            )
        if entry.name in _OBJECTS:
            name = "obj" if "obj" in given else next(iter(given))
            real = program.read(entry.name, lambda found: found, (given[name],), {})
            if name == "obj":
                given["obj"] = real
            else:
                given[name][:] = real
            return self._carry_out(entry, given)
        is_pending = given.pop("async_op", False)
        result = program.operation(entry.name, self._runs[id(entry.function)], (), given)
        return _Done() if is_pending else result

    def _run(self, entry: _Exchanged, /, **given: Any) -> Any:
        """Carry out the call as an operation of the program."""
        # Waits, as a program takes no pending results: the tensor may be sent next.
        result = self._carry_out(entry, given)
        return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result

    def _carry_out(self, entry: _Exchanged, given: dict[str, Any]) -> Any:
        group, replicas = given.get("group"), self._replicas
        if self._is_default(group) or group is replicas.group:
            _check_lists(entry.name, given, replicas.size)
            if not self._meets_now:
                return self._alone(entry, given, replicas.place)
            self._has_met = True
            if self._improvises:
                self._refuse_improvised(f"`{entry.name}` in the step")
            # Global ranks of the user's view are numbers of replicas, so torch takes them as ranks of the group.
            if self._is_default(group):
                for name, among in _ROOTS.items():
                    if among in entry.signature.parameters and given.get(name) is not None:
                        given[among] = given.pop(name)
            given["group"] = replicas.group
            if entry.name in _MESSAGES or replicas.group is None:
                return entry.original(**given)
            return _watched(lambda: entry.original(**given), replicas.group, f"`{entry.name}` in the step")
        self._refuse_mixing(entry.name, group)
        if not self._meets_now and isinstance(group, dist.ProcessGroup):
            return self._alone(entry, given, ReplicaNumber(group.rank(), group.size()))
        return entry.original(**given)

    def _alone(self, entry: _Exchanged, given: dict[str, Any], place: ReplicaNumber) -> Any:
        if entry.name in ("__new__", "__init__"):
            return entry.original(**given)
        if entry.is_functional:
            with torch.set_grad_enabled(torch.is_grad_enabled() and entry.name.endswith("_autograd")):
                return FUNCTIONAL_AS_IF_ALIKE[entry.name](given, place)
        with torch.no_grad():
            result = AS_IF_ALIKE[entry.name](given, place)
        is_pending = given.get("async_op") or entry.name in ("isend", "irecv")
        return _Done() if is_pending else result

    @property
    def _meets_now(self) -> bool:
        program = self._current.interpreter
        return self._meets and (program is None or not program.is_predicting)

    def _is_default(self, group: Any) -> bool:
        if group is None or group is dist.group.WORLD:
            return True
        if isinstance(group, str):
            return dist.is_initialized() and group == getattr(dist.group.WORLD, "group_name", None)
        return isinstance(group, (list, range)) and list(group) == list(range(self._replicas.size))

    def _refuse_mixing(self, name: str, group: Any) -> None:
        replicas = self._replicas
        if not isinstance(group, dist.ProcessGroup):
            if replicas.is_whole or group is not dist.GroupMember.NON_GROUP_MEMBER:
                return
            ranks: Collection[int] = ()
        else:
            ranks = dist.get_process_group_ranks(group)
            if replicas.members.issuperset(ranks):
                return
        among = sorted(replicas.members)
        raise UnsupportedError(
            f"`{name}` in a step is given a process group of "
            f"{f'the ranks {sorted(ranks)}' if ranks else 'other ranks than this one'}. But of the values of a step "
            f"this rank has those of its stage, as have the same stages of other replicas, here the ranks {among}. "
            "Leave `group` out: in a step, the default group means the replicas. Or make one group for each stage, of "
            "such ranks only."
        )


def _asks_package() -> bool:
    """Whether the current call of a collective is one of this package's own."""
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__", "")) in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return name.startswith(_PACKAGE) and not name.startswith(_DOORS)


def _check_lists(name: str, given: dict[str, Any], size: int) -> None:
    for key in _LISTS:
        found = given.get(key)
        if found and len(found) != size and name != "all_gather_coalesced":
            raise UnsupportedError(
                f"`{name}` in a step is given {len(found)} tensors as `{key}`, but {size} replica{'s' * (size > 1)} "
                f"meet{'s' * (size == 1)}: ranks that hold other stages of the same samples do not count. Ask for "
                "their number in the step: there, `dist.get_world_size()` is the number of replicas."
            )
