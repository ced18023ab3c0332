"""Collectives that are watched: the only ones of this package but those of flat buffers and split layers.

Tensors travel as torch sends them, and who waits for them is watched (:mod:`smp_strategy.distributed.deadlock`).

What ranks tell each other otherwise (objects, decisions, that they are there) begins with an exchange of numbers that
is the same for all kinds: a digest of what it is about, how many collectives there were before, and a size. So ranks
that are in different calls know it, instead of taking each other's values for their own.

gloo takes any two all-reduces of a group for one, and ends the process if their sizes differ. So sums of gradients have
a group of their own, and a few numbers that ranks reduce beside them (a norm, what has changed) are messages that say
in their tag what they are (:func:`reduce_numbers`). Of ranks in different calls none finds a partner, and the watch
tells all of them.
"""

import functools
import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.deadlock import BegunCollective, user_code, watch_of
from smp_strategy.distributed.wait_positions import Condition
from smp_strategy.errors import ApartError

__all__ = [
    "PlaceComparison",
    "UnderWay",
    "all_gather",
    "all_reduce",
    "barrier",
    "begin",
    "broadcast",
    "collect",
    "gather_numbers",
    "gather_objects",
    "receive",
    "receive_object",
    "reduce_numbers",
    "send",
    "send_object",
    "tell",
]

T = TypeVar("T")

# Tags that no other message has; and how long a description may be.
_NUMBERS, _TEXTS, _COMPARED = (1 << 31) - 2, (1 << 31) - 3, (1 << 31) - 4
_MOST_BYTES = 2048
# Tags of numbers that are reduced have this bit, and none of those above. With how many bytes and ranks each rank sends
# to each: gloo's ring would take twice as many messages, one after the other.
_REDUCED: Final = 1 << 30
_MOST_REDUCED_BYTES: Final = 1 << 15
_MOST_SENDERS: Final = 32
_TWO_BY_TWO: Final[Mapping[Any, Callable[..., Tensor]]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}


class _WatchedWork(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


@final
class UnderWay:
    """A collective that is under way."""

    def __init__(self, meeting: BegunCollective, work: _WatchedWork) -> None:
        self._meeting = meeting
        self._work = work

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Until it is over."""
        watch_of().until(self._meeting, self._work.wait)


@final
class _Numbers:
    """Numbers that each rank of a group sends to each, to reduce them by itself, in the order of the ranks."""

    def __init__(self, tensor: Tensor, combine: Callable[..., Tensor], group: dist.ProcessGroup, tag: int) -> None:
        self._tensor = tensor
        self._combine = combine
        self._mine = mine = tensor.contiguous()
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        found = {rank: torch.empty_like(mine) for rank in others}
        self._works = [group.recv([found[rank]], rank, tag) for rank in others]
        self._works += [group.send([mine], rank, tag) for rank in others]
        self._everyones = [found.get(rank, mine) for rank in range(group.size())]

    def is_completed(self) -> bool:
        return not self._works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._works:
            self._works = []
            with torch.no_grad():
                self._tensor.copy_(functools.reduce(self._combine, self._everyones))


@final
class PlaceComparison:
    """Ranks of a small group compare where they are, as :func:`barrier` does, but compute until they need to know.

    Each sends to each, so that what this rank waits for is on its way when it comes to wait.

    Args:
        doing: as for :func:`begin`.
        group: the ranks.
    """

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self._meeting = meeting = watch_of().begin(group, doing)
        self._mine = torch.tensor([zlib.crc32(doing.encode()), meeting.number], dtype=torch.int64, device="cpu")
        self._theirs = [torch.empty_like(self._mine) for _ in range(group.size() - 1)]
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        try:
            found = zip(self._theirs, others, strict=True)
            self._works = [group.recv([theirs], rank, _COMPARED) for theirs, rank in found]
            self._works += [group.send([self._mine], rank, _COMPARED) for rank in others]
        except RuntimeError as error:
            _raise(meeting, error)

    def wait(self) -> None:
        """Until all are there.

        Raises:
            ApartError: they are in different calls.
        """
        watch_of().until(self._meeting, lambda: [work.wait() for work in self._works])
        if not all(torch.equal(theirs, self._mine) for theirs in self._theirs):
            _raise_different(self._meeting)


def begin(doing: str, group: dist.ProcessGroup | None, start: Callable[[], dist.Work | None]) -> UnderWay:
    """Begin a collective.

    Args:
        doing: what for, in words that go on from "waits for"; the same on all ranks.
        group: its ranks; ``None``: all.
        start: starts it.
    """
    group = _group(group)
    meeting = watch_of().begin(group, doing)
    try:
        work = start()
    except RuntimeError as error:
        _raise(meeting, error)
    assert work is not None
    return UnderWay(meeting, work)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None, doing: str) -> UnderWay:
    """Begin to reduce the ranks' ``tensor``, in place."""
    return begin(doing, group, lambda: dist.all_reduce(tensor, op, group=group, async_op=True))


def reduce_numbers(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None, doing: str
) -> UnderWay:
    """Begin to reduce a few numbers, in place; see the module docstring.

    On an accelerator, and if they are many or the ranks are, this is :func:`all_reduce`.
    """
    group = _group(group)
    combine = _TWO_BY_TWO.get(op)
    is_small = tensor.numel() * tensor.element_size() <= _MOST_REDUCED_BYTES and 1 < group.size() <= _MOST_SENDERS
    if combine is None or not is_small or tensor.device.type != "cpu" or not _is_gloo(group):
        return all_reduce(tensor, op, group=group, doing=doing)
    meeting = watch_of().begin(group, doing)
    digest = zlib.crc32(f"{doing} {tensor.dtype} {tensor.numel()}".encode())
    try:
        return UnderWay(meeting, _Numbers(tensor, combine, group, _REDUCED | (digest % _REDUCED & ~15)))
    except RuntimeError as error:
        _raise(meeting, error)


def all_gather(parts: list[Tensor], mine: Tensor, *, group: dist.ProcessGroup | None, doing: str) -> UnderWay:
    """Begin to fill ``parts`` with what each rank has."""
    return begin(doing, group, lambda: dist.all_gather(parts, mine, group=group, async_op=True))


def broadcast(tensor: Tensor, source: int, *, group: dist.ProcessGroup | None, doing: str) -> UnderWay:
    """Begin to fill ``tensor`` with that of the global rank ``source``."""
    return begin(doing, group, lambda: dist.broadcast(tensor, source, group=group, async_op=True))


def barrier(doing: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks.

    Raises:
        ApartError: they are in different calls, here and below.
    """
    gather_numbers(0, doing, group)


def gather_numbers(number: int, doing: str, group: dist.ProcessGroup | None = None) -> list[int]:
    """The number of each rank."""
    group = _group(group)
    meeting = watch_of().begin(group, doing)
    mine = torch.tensor([zlib.crc32(doing.encode()), meeting.number, number], dtype=torch.int64, device="cpu")
    kinds, places, numbers = _exchanged(mine, meeting, _NUMBERS).t().tolist()
    if len(set(zip(kinds, places, strict=True))) > 1:
        _raise_different(meeting)
    return list(numbers)


def _raise_different(meeting: BegunCollective) -> NoReturn:
    described = json.dumps([meeting.doing, meeting.number, user_code()]).encode()[:_MOST_BYTES]
    texts = _exchanged(_as_bytes(described.ljust(_MOST_BYTES)), meeting, _TEXTS)
    everyones = [bytes(text.tolist()).decode(errors="replace").strip() for text in texts]
    raise ApartError(_different(dict(zip(dist.get_process_group_ranks(meeting.group), everyones, strict=True))))


def _exchanged(mine: Tensor, meeting: BegunCollective, tag: int) -> Tensor:
    """What each rank has, by way of the first one.

    Messages, and no collective, since a rank that is elsewhere may be in a collective of this group: gloo would take
    the one for the other, and end the process if their sizes differ.
    """
    group, others = meeting.group, range(1, meeting.group.size())
    # In a group of which only this rank exists (torch's `fake` backend) all others have the same.
    found = torch.stack([mine] * group.size())

    def exchange() -> None:
        if group.rank() == 0:
            found[0] = mine
            arriving = [group.recv([found[rank]], rank, tag) for rank in others]
            for work in arriving:
                work.wait()
            leaving = [group.send([found], rank, tag) for rank in others]
        else:
            leaving = [group.send([mine], 0, tag)]
            group.recv([found], 0, tag).wait()
        for work in leaving:
            work.wait()

    watch_of().until(meeting, exchange)
    return found


def gather_objects(value: T, doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """The object of each rank, any that can be pickled."""
    return [pickle.loads(each) for each in _gather_bytes(pickle.dumps(value), doing, group)]


def collect(value: T, target: int, doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """The object of each rank, on the global rank ``target``; elsewhere nothing."""
    mine, sizes = _told_size(value, doing, group)
    is_here = dist.get_rank() == target
    parts = [mine.new_empty(max(sizes)) for _ in sizes] if is_here else None
    begin(doing, group, lambda: dist.gather(_padded(mine, sizes), parts, target, group=group, async_op=True)).wait()
    return [_loaded(part, size) for part, size in zip(parts or (), sizes, strict=is_here)]


def tell(value: T, source: int, doing: str, group: dist.ProcessGroup | None = None) -> T:
    """The object of the global rank ``source``; that itself there."""
    is_here = dist.get_rank() == source
    mine, sizes = _told_size(value if is_here else None, doing, group)
    size = sizes[dist.get_group_rank(_group(group), source)]
    box = mine if is_here else mine.new_empty(size)
    broadcast(box, source, group=group, doing=doing).wait()
    return value if is_here else _loaded(box, size)


def send(tensor: Tensor, target: int, doing: str) -> None:
    """Send ``tensor`` to the global rank ``target``, which receives it; ``doing`` as for :func:`begin`."""
    _message(dist.get_rank(), target, doing, lambda: dist.isend(tensor, target))


def receive(tensor: Tensor, source: int, doing: str) -> None:
    """Fill ``tensor`` with what the global rank ``source`` sends to this one."""
    _message(source, dist.get_rank(), doing, lambda: dist.irecv(tensor, source))


def send_object(value: Any, target: int, doing: str) -> None:
    """Send an object to the global rank ``target``, which receives it."""
    sent = _as_bytes(pickle.dumps(value))
    send(torch.tensor([len(sent)], dtype=torch.int64, device="cpu"), target, doing)
    send(sent, target, doing)


def receive_object(source: int, doing: str) -> Any:
    """What the global rank ``source`` sends to this one."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    receive(size, source, doing)
    found = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    receive(found, source, doing)
    return _loaded(found, len(found))


def _message(source: int, target: int, doing: str, start: Callable[[], dist.Work | None]) -> None:
    watch, world = watch_of(), _group(None)
    number = watch.count(f"{source} to {target}", doing)
    needs = [[Condition(rank, f"{source} to {target}", number) for rank in (source, target)]]
    with watch.waiting(lambda: needs, world, doing):
        work = start()
        assert work is not None
        work.wait()


def _gather_bytes(mine: bytes, doing: str, group: dist.ProcessGroup | None) -> list[bytes]:
    sent = _as_bytes(mine)
    sizes = gather_numbers(len(sent), doing, group)
    sent = _padded(sent, sizes)
    parts = [torch.empty_like(sent) for _ in sizes]
    all_gather(parts, sent, group=group, doing=doing).wait()
    return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _told_size(value: Any, doing: str, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """``value`` as bytes, and how many each rank has."""
    mine = _as_bytes(pickle.dumps(value))
    return mine, gather_numbers(len(mine), doing, group)


def _as_bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _padded(mine: Tensor, sizes: Sequence[int]) -> Tensor:
    return mine if len(mine) == max(sizes) else torch.cat([mine, mine.new_zeros(max(sizes) - len(mine))])


def _loaded(part: Tensor, size: int) -> Any:
    return pickle.loads(part[:size].numpy().tobytes())


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether that is what carries its messages between hosts, and no double of it."""
    return group._get_backend(torch.device("cpu")).name() == "gloo"


def _raise(meeting: BegunCollective, error: RuntimeError) -> NoReturn:
    def fail() -> None:
        raise error

    watch_of().until(meeting, fail)
    raise error


def _different(calls: dict[int, str]) -> str:
    lines = "\n".join(f"  rank {rank}: {_described(text)}" for rank, text in sorted(calls.items()))
    return (
        f"Ranks are in different calls that all of them have to make together:\n{lines}\n"
        "The model is spread over the ranks, so all of them must make such calls, in the same order: take "
        "`save_state`, `load_state`, `save_model`, `get_state_dict`, `save_checkpoint`, `resume_from_checkpoint`, and "
        "calls of the model, out of `if accelerator.is_main_process:`, `if rank == 0:` and `@rank_zero_only` (each "
        "process writes only what is its own in any case), and stop or skip batches on all ranks alike."
    )


def _described(text: str) -> str:
    try:
        doing, number, place = json.loads(text)
    except ValueError:  # it was too long
        return text
    return f"{doing}, after {number - 1} other collectives of the group ({place})"
