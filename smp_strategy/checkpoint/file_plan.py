"""Plan of a save to files of whole tensors: which rank writes a file, and in what order tensors are gathered.

A file has one writer, a rank that has as much of it as any other. A file is written in *portions*: the tensors that are
made of the same entries of the state dict, since these are gathered once for all of them. Portions of different
writers take turns, so that all writers are at work, and all ranks know the order, so that sends and receives match.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from smp_strategy.checkpoint.stand_in import Recipe, entries_of
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.distributed.balance import balanced_among

__all__ = ["PlannedFile", "PlannedTensor", "Portion", "assign_writers", "in_rounds", "portions_in_turn"]

T = TypeVar("T")


class PlannedTensor(NamedTuple):
    """Tensor of a file."""

    info: LocalTensorInfo
    recipe: Recipe


class PlannedFile(NamedTuple):
    """Safetensors file that is to be written."""

    name: str
    """Path within the folder."""
    tensors: Mapping[str, PlannedTensor]
    metadata: Mapping[str, str] | None


class Portion(NamedTuple):
    """Tensors of one file that are made of the same entries."""

    file: int
    names: tuple[str, ...]
    entries: tuple[str, ...]
    """Entries of the state dict to gather on the writer, in order."""


def assign_writers(held: Sequence[Sequence[int]], writers: Sequence[int]) -> list[int]:
    """Writer of each file: one that has as many bytes of it as any, so that the bytes of all files are balanced.

    Args:
        held: For each file, the bytes that each rank has of it.
        writers: Ranks that can write.
    """
    most = [max(amounts[rank] for rank in writers) for amounts in held]
    choices = [[rank for rank in writers if amounts[rank] == best] for amounts, best in zip(held, most, strict=True)]
    num_ranks = max(writers) + 1
    return balanced_among([sum(amounts) for amounts in held], choices, num_ranks)


def _portions(number: int, file: PlannedFile) -> list[Portion]:
    """Portions of a file, in the order of their first tensors."""
    members: dict[frozenset[str], list[str]] = {}
    for name, tensor in file.tensors.items():
        members.setdefault(entries_of(tensor.recipe), []).append(name)
    return [Portion(number, tuple(names), tuple(sorted(entries))) for entries, names in members.items()]


def portions_in_turn(files: Sequence[PlannedFile], writers: Sequence[int]) -> list[Portion]:
    """All portions: each writer's in the order of its files, and those of different writers in turn.

    Args:
        files: All files.
        writers: Writer of each.
    """
    queues: dict[int, list[Portion]] = {}
    for number, (file, writer) in enumerate(zip(files, writers, strict=True)):
        queues.setdefault(writer, []).extend(_portions(number, file))
    waiting = list(map(iter, queues.values()))
    found: list[Portion] = []
    while waiting:
        turn = [(queue, next(queue, None)) for queue in waiting]
        found += [portion for _, portion in turn if portion is not None]
        waiting = [queue for queue, portion in turn if portion is not None]
    return found


def in_rounds(parts: Sequence[T], sizes: Sequence[int], most: int = 1 << 30) -> Iterator[Sequence[T]]:
    """Cut ``parts`` into rounds of ``most`` bytes, and of one part at least.

    Args:
        parts: All portions or tensors, in order.
        sizes: Bytes of each.
        most: Bytes of a round.
    """
    begin, total = 0, 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > most:
            yield parts[begin:number]
            begin, total = number, 0
        total += size
    if begin < len(parts):
        yield parts[begin:]
