"""Watched collectives: the only ones of this package except those of flat buffers and split layers.

Tensors are sent as torch sends them, and every wait is watched (:mod:`smp_strategy.distributed.deadlock`).

Objects, decisions and barriers begin with an exchange of numbers that is the same for all kinds: a digest of the
purpose, the count of earlier collectives, and a size. So ranks that are in different calls notice, instead of taking
each other's values for their own.

gloo takes any two all-reduces of a group for one, and ends the process if their sizes differ. So sums of gradients have
a group of their own, and a few numbers that ranks reduce beside them (a norm, what has changed) are messages whose tag
tells their purpose (:func:`reduce_numbers`). Ranks in different calls find no partner, and the watch tells all of them.
"""

import functools
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import pending_messages
from smp_strategy.distributed.deadlock import BegunCollective, user_code, watch_of
from smp_strategy.distributed.failure import current_run
from smp_strategy.distributed.handle import Handle
from smp_strategy.distributed.message_tags import NUMBERS, TEXTS, reduced_numbers
from smp_strategy.distributed.wait_positions import Condition
from smp_strategy.errors import ApartError

__all__ = [
    "FAN_OUT",
    "all_gather",
    "all_reduce",
    "barrier",
    "begin",
    "broadcast",
    "collect",
    "compare_places",
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

FAN_OUT: Final = 8
"""Number of ranks to which one passes on what it has been told, where all exchange numbers."""
# Limit of a description of a call.
_MOST_BYTES: Final = 2048
# Limits up to which each rank sends its numbers to each: gloo's ring takes twice as many messages, one after the other.
_MOST_REDUCED_BYTES: Final = 1 << 15
_MOST_SENDERS: Final = 32
_TWO_BY_TWO: Final[Mapping[Any, Callable[..., Tensor]]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}


def compare_places(doing: str, group: dist.ProcessGroup | None, numbers: Sequence[int] = ()) -> Handle[list[list[int]]]:
    """Begin to compare where ranks are, as :func:`barrier` does; compute until you need to know.

    In a small group each sends to each, so that the numbers are there when a rank comes to wait. The wait raises
    :class:`ApartError` if ranks are in different calls.

    Args:
        doing: Purpose, as for :func:`begin`.
        group: Ranks that compare; ``None``: all.
        numbers: Numbers of this rank to send along, equally many on all.

    Returns:
        Handle of the numbers of each rank.
    """
    group = _group(group)
    meeting = watch_of().begin(group, doing)
    mine = torch.tensor([zlib.crc32(doing.encode()), meeting.number, *numbers], dtype=torch.int64, device="cpu")
    try:
        if group.size() > _MOST_SENDERS:
            found = [mine.clone() for _ in range(group.size())]
            gathered = dist.all_gather(found, mine, group=group, async_op=True)
            assert gathered is not None
            waits: list[Callable[[], object]] = [gathered.wait]
        else:
            # An earlier run may have failed after one rank has sent its numbers, and before another has.
            found, waits = _sent_to_each(mine, group, reduced_numbers(zlib.crc32(f"places {current_run()}".encode())))
    except RuntimeError as error:
        _raise(meeting, error)

    def compare(_: object) -> list[list[int]]:
        if not all(torch.equal(theirs[:2], mine[:2]) for theirs in found):
            _raise_different(meeting)
        return [theirs[2:].tolist() for theirs in found]

    return meeting.work(lambda: [wait() for wait in waits]).then(compare)


def _sent_to_each(mine: Tensor, group: dist.ProcessGroup, tag: int) -> tuple[list[Tensor], list[Callable[[], object]]]:
    """Begin to send ``mine`` to each rank: everyone's, in the order of the ranks, after all waits."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    # With torch's `fake` backend only this rank exists; all others have the same then.
    found = [mine if rank == group.rank() else mine.clone() for rank in range(group.size())]
    waits: list[Callable[[], object]] = [pending_messages.receive(found[rank], rank, tag, group) for rank in others]
    return found, waits + [pending_messages.send(mine, rank, tag, group) for rank in others]


def begin(doing: str, group: dist.ProcessGroup | None, start: Callable[[], dist.Work | None]) -> Handle[object]:
    """Begin a collective.

    Args:
        doing: Purpose, in words that continue "waits for"; the same on all ranks.
        group: Its ranks; ``None``: all.
        start: Starts it.
    """
    group = _group(group)
    meeting = watch_of().begin(group, doing)
    try:
        work = start()
    except RuntimeError as error:
        _raise(meeting, error)
    assert work is not None
    return meeting.work(work.wait, work.is_completed)


def all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None, doing: str
) -> Handle[object]:
    """Begin to reduce the ranks' ``tensor``, in place."""
    return begin(doing, group, lambda: dist.all_reduce(tensor, op, group=group, async_op=True))


def reduce_numbers(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None, doing: str
) -> Handle[object]:
    """Begin to reduce a few numbers, in place, by messages that are told apart by their purpose.

    On an accelerator, and for many numbers or ranks, this is :func:`all_reduce`.
    """
    group = _group(group)
    combine = _TWO_BY_TWO.get(op)
    is_small = tensor.numel() * tensor.element_size() <= _MOST_REDUCED_BYTES and 1 < group.size() <= _MOST_SENDERS
    if combine is None or not is_small or tensor.device.type != "cpu" or not _is_gloo(group):
        return all_reduce(tensor, op, group=group, doing=doing)
    meeting = watch_of().begin(group, doing)
    # An earlier run may have failed after one rank has sent its numbers, and before another has.
    digest = zlib.crc32(f"{doing} {tensor.dtype} {tensor.numel()} {current_run()}".encode())
    try:
        return meeting.work(_exchange_numbers(tensor, combine, group, reduced_numbers(digest)))
    except RuntimeError as error:
        _raise(meeting, error)


def _exchange_numbers(
    tensor: Tensor, combine: Callable[..., Tensor], group: dist.ProcessGroup, tag: int
) -> Callable[[], None]:
    """Each rank sends its numbers to each, which reduces them by itself, in the order of the ranks."""
    found, waits = _sent_to_each(tensor.contiguous(), group, tag)

    def finish() -> None:
        for wait in waits:
            wait()
        with torch.no_grad():
            tensor.copy_(functools.reduce(combine, found))

    return finish


def all_gather(parts: list[Tensor], mine: Tensor, *, group: dist.ProcessGroup | None, doing: str) -> Handle[object]:
    """Begin to fill ``parts`` with each rank's ``mine``."""
    return begin(doing, group, lambda: dist.all_gather(parts, mine, group=group, async_op=True))


def broadcast(tensor: Tensor, source: int, *, group: dist.ProcessGroup | None, doing: str) -> Handle[object]:
    """Begin to broadcast ``tensor`` from the global rank ``source``, in place."""
    return begin(doing, group, lambda: dist.broadcast(tensor, source, group=group, async_op=True))


def barrier(doing: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks.

    Raises:
        ApartError: Ranks are in different calls, here and below.
    """
    gather_numbers(0, doing, group)


def gather_numbers(number: int, doing: str, group: dist.ProcessGroup | None = None) -> list[int]:
    group = _group(group)
    meeting = watch_of().begin(group, doing)
    mine = torch.tensor([zlib.crc32(doing.encode()), meeting.number, number], dtype=torch.int64, device="cpu")
    kinds, places, numbers = _exchanged(mine, meeting, NUMBERS).t().tolist()
    if len(set(zip(kinds, places, strict=True))) > 1:
        _raise_different(meeting)
    return list(numbers)


def _raise_different(meeting: BegunCollective) -> NoReturn:
    described = json.dumps([meeting.doing, meeting.number, user_code()]).encode()[:_MOST_BYTES]
    texts = _exchanged(_as_bytes(described.ljust(_MOST_BYTES)), meeting, TEXTS)
    everyones = [bytes(text.tolist()).decode(errors="replace").strip() for text in texts]
    raise ApartError(_different(dict(zip(dist.get_process_group_ranks(meeting.group), everyones, strict=True))))


def _exchanged(mine: Tensor, meeting: BegunCollective, tag: int) -> Tensor:
    """All-gather ``mine`` up and down a tree of ranks, so that no rank has a connection to all others.

    By messages, not by a collective, since a rank that is elsewhere may be in a collective of this group: gloo would
    take the one for the other, and end the process if their sizes differ.
    """
    group, (rank, size) = meeting.group, (meeting.group.rank(), meeting.group.size())
    above, below = (rank - 1) // FAN_OUT, _below(range(rank, rank + 1), size)
    # With torch's `fake` backend only this rank exists; all others have the same then.
    found = torch.stack([mine] * size)

    def exchange() -> None:
        arriving = {child: found[list(_subtree(child, size))] for child in below}
        for wait in [pending_messages.receive(rows, child, tag, group) for child, rows in arriving.items()]:
            wait()
        for child, rows in arriving.items():
            found[list(_subtree(child, size))] = rows
        leaving = []
        if rank:
            leaving.append(pending_messages.send(found[list(_subtree(rank, size))], above, tag, group))
            pending_messages.receive(found, above, tag, group)()
        leaving += [pending_messages.send(found, child, tag, group) for child in below]
        for wait in leaving:
            wait()

    watch_of().until(meeting, exchange)
    return found


def _below(ranks: range, size: int) -> range:
    """Ranks right below ``ranks``, which are neighbours, in a tree of ``size`` ranks."""
    return range(min(ranks.start * FAN_OUT + 1, size), min(ranks.stop * FAN_OUT + 1, size))


def _subtree(rank: int, size: int) -> Iterator[int]:
    """``rank`` and all ranks below it, in a tree of ``size`` ranks."""
    level = range(rank, rank + 1)
    while level:
        yield from level
        level = _below(level, size)


def gather_objects(value: T, doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """All-gather a picklable object of each rank."""
    return [pickle.loads(each) for each in _gather_bytes(pickle.dumps(value), doing, group)]


def collect(value: T, target: int, doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather an object of each rank on the global rank ``target``; elsewhere the list is empty."""
    mine, sizes = _told_size(value, doing, group)
    is_here = dist.get_rank() == target
    parts = [mine.new_empty(max(sizes)) for _ in sizes] if is_here else None
    begin(doing, group, lambda: dist.gather(_padded(mine, sizes), parts, target, group=group, async_op=True)).wait()
    return [_loaded(part, size) for part, size in zip(parts or (), sizes, strict=is_here)]


def tell(value: T, source: int, doing: str, group: dist.ProcessGroup | None = None) -> T:
    """Broadcast an object from the global rank ``source``, which gets ``value`` itself back."""
    is_here = dist.get_rank() == source
    mine, sizes = _told_size(value if is_here else None, doing, group)
    size = sizes[dist.get_group_rank(_group(group), source)]
    box = mine if is_here else mine.new_empty(size)
    broadcast(box, source, group=group, doing=doing).wait()
    return value if is_here else _loaded(box, size)


def send(tensor: Tensor, target: int, doing: str) -> None:
    """Send ``tensor`` to the global rank ``target``; ``doing`` as for :func:`begin`."""
    _message(dist.get_rank(), target, doing, lambda: dist.isend(tensor, target))


def receive(tensor: Tensor, source: int, doing: str) -> None:
    """Receive ``tensor`` from the global rank ``source``."""
    _message(source, dist.get_rank(), doing, lambda: dist.irecv(tensor, source))


def send_object(value: Any, target: int, doing: str) -> None:
    """Send an object to the global rank ``target``."""
    sent = _as_bytes(pickle.dumps(value))
    send(torch.tensor([len(sent)], dtype=torch.int64, device="cpu"), target, doing)
    send(sent, target, doing)


def receive_object(source: int, doing: str) -> Any:
    """Receive an object from the global rank ``source``."""
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
    """``value`` as bytes, and the number of bytes of each rank."""
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
    """Whether the backend for host tensors is gloo, and not a test double."""
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
