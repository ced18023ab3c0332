"""Inputs that must be the same on all ranks of a replica: their digests, and the comparison when a step begins.

All ranks of a replica run the same program on the same tensors. If each calls the model with inputs of its own (samples
dealt out by ``dist.get_rank()``, noise of a generator that nobody has seeded), stages would continue with the values of
other inputs, without any error, or gloo would end the process because sizes differ.

[Note: lower stages] At the begin of a step each stage sends a digest of its inputs to all later stages, and waits for
those of earlier ones before anything else. Suppose that two stages differ: the later one raises before it sends
anything, and so does every stage that would have received from either of them. The first stage waits for nobody; the
others would have waited for its activations anyway.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.distributed import pending_messages
from smp_strategy.distributed.deadlock import watch_of
from smp_strategy.distributed.failure import current_run, publish_own
from smp_strategy.distributed.message_tags import reduced_numbers
from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.distributed.wait_positions import Condition
from smp_strategy.errors import UnsupportedError

__all__ = [
    "NO_INPUTS",
    "InputDigest",
    "are_alike",
    "compare_with_earlier",
    "digest_of",
    "looks_closely",
    "refused",
    "rounded",
]

_MOST_ELEMENTS: Final = 16384
"""Elements of a tensor that are compared."""
# Levels of nesting that are looked into; an object counts as several, since objects may hold anything.
_MOST_LEVELS: Final = 8
_LEVELS_OF_OBJECT: Final = 3
# Packages of tensors whose values are elsewhere.
_WITHOUT_VALUES: Final = ("smp_strategy", "torch._subclasses", "torch.distributed")


class InputDigest(NamedTuple):
    """Digest of the inputs of a call."""

    shapes: int
    """Of shapes and dtypes."""
    values: int
    """Of values."""

    @property
    def number(self) -> int:
        return self.shapes >> 1 << 32 | self.values


NO_INPUTS: Final = InputDigest(0, 0)
"""Digest where inputs are not compared."""

_Sent: TypeAlias = tuple[list[Condition], list[Callable[[], None]]]
# Digests under way, by run: where their receivers must be, and waits for them. Those of a failed run may never arrive.
_SENT: Final = WeakKeyDictionary[dist.ProcessGroup, dict[int, deque[_Sent]]]()
_MOST_AHEAD: Final = 2
"""Comparisons whose messages may be under way when the next one begins."""


def looks_closely(number: int) -> bool:
    """Whether the ``number``-th comparison of a kind may cost time: the first ones, and some later ones."""
    return number <= 8 or number % 64 == 0


def digest_of(
    tree: Any, *, reads_device: bool = True, most: int | None = _MOST_ELEMENTS, texts: bool = False
) -> InputDigest:
    """Digest of the tensors, arrays and numbers in ``tree``, in their order.

    Args:
        tree: Nest of mappings, sequences and objects.
        reads_device: Whether to compare values on accelerators, which waits for all work there.
        most: Elements of a tensor that are compared, evenly distributed; ``None``: all.
        texts: Whether strings are compared, too.
    """
    shapes = values = 0
    for leaf in _leaves(tree, _MOST_LEVELS):
        if isinstance(leaf, (Tensor, np.ndarray)):
            is_nested = isinstance(leaf, Tensor) and leaf.is_nested  # whose sizes have names of this process
            shapes = zlib.crc32(f"{leaf.dtype} {leaf.ndim if is_nested else tuple(leaf.shape)}".encode(), shapes)
            content = leaf if isinstance(leaf, np.ndarray) else _content(leaf, reads_device, most)
            if content is not None:
                values = zlib.crc32(np.ascontiguousarray(content).data, values)
        elif isinstance(leaf, (bool, int, float)) or (texts and isinstance(leaf, (str, bytes))):
            values = zlib.crc32(repr(leaf).encode(), values)
    return InputDigest(shapes, values)


def rounded(value: float, dtype: torch.dtype) -> tuple[int, float]:
    """Digest of a number that was computed in ``dtype``: how many digits count, as a negative number, unlike digests of
    shapes; and the number with these digits. Ranks with other processors may round otherwise.
    """
    digits = 2 if torch.finfo(dtype).bits < 32 else 4
    return -digits, float(f"{value:.{digits}g}")


def are_alike(kind: int, one: float, other: float) -> bool:
    """Whether two digests with the same first number are those of the same values."""
    if kind >= 0:
        return one == other
    return math.isclose(one, other, rel_tol=10.0 ** (1 + kind), abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def _leaves(value: Any, levels: int) -> Iterator[Any]:
    if isinstance(value, Tensor):
        if not type(value).__module__.startswith(_WITHOUT_VALUES):
            yield value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield value
    elif isinstance(value, Mapping):
        for each in value.values() if levels > 0 else ():
            yield from _leaves(each, levels - 1)
    elif isinstance(value, (list, tuple)):
        for each in value if levels > 0 else ():
            yield from _leaves(each, levels - 1)
    elif isinstance(value, (bool, int, float, str, bytes)):
        yield value
    elif levels > 0 and not isinstance(value, (nn.Module, type, FunctionType)):
        for each in getattr(value, "__dict__", {}).values():
            yield from _leaves(each, levels - _LEVELS_OF_OBJECT)


def _content(tensor: Tensor, reads_device: bool, most: int | None) -> Any:
    is_readable = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
    if not is_readable or not tensor.numel() or not (reads_device or tensor.device.type == "cpu"):
        return None
    with plain_functions():  # of a subclass (images, say)
        flat = tensor.detach().reshape(-1)
        step = 1 if most is None else max(len(flat) // most, 1)
        some = flat[::step].cpu().contiguous().resolve_conj().resolve_neg()
        # A single element counts as contiguous whatever its stride.
        return some.as_strided((len(some),), (1,)).view(torch.uint8).numpy()


def compare_with_earlier(mine: InputDigest, doing: str, group: dist.ProcessGroup) -> None:
    """Compare inputs with those of earlier stages. Collective over ``group``; see [Note: lower stages].

    Args:
        mine: Digest of this rank's inputs.
        doing: What begins, in words that continue "waits for"; the same on all ranks.
        group: Stages of a replica; a later stage has a lower rank in it.

    Raises:
        UnsupportedError: An earlier stage has other inputs.
    """
    watch, here = watch_of(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    number = watch.count(group.group_name, doing)
    # An earlier run may have failed between a message and its receive.
    tag = reduced_numbers(zlib.crc32(f"inputs {doing} {current_run()}".encode()))
    sent = torch.tensor(mine, dtype=torch.int64, device="cpu")
    receivers = [Condition(ranks[rank], group.group_name, number) for rank in range(here)]
    waits = [pending_messages.send(sent, rank, tag, group) for rank in range(here)]
    begun = _SENT.setdefault(group, {}).setdefault(current_run(), deque())
    begun.append((receivers, waits))
    if len(begun) > _MOST_AHEAD:
        receivers, waits = begun.popleft()
        with watch.waiting(lambda: [receivers], group, doing):
            for wait in waits:
                wait()
    earlier = range(here + 1, group.size())
    if not earlier:
        return
    needs = [[Condition(ranks[rank], group.group_name, number) for rank in earlier]]
    # With torch's `fake` backend only this rank exists; all others have the same then.
    found = {rank: sent.clone() for rank in earlier}
    with watch.waiting(lambda: needs, group, doing):
        for wait in [pending_messages.receive(theirs, rank, tag, group) for rank, theirs in found.items()]:
            wait()
    for rank, theirs in found.items():
        if not torch.equal(theirs, sent):
            error = refused(doing, (ranks[rank], ranks[here]), has_other_shapes=int(theirs[0]) != mine.shapes)
            publish_own(error)  # the earlier stage is in its step, where it learns of it
            raise error


def refused(doing: str, ranks: tuple[int, int], *, has_other_shapes: bool) -> UnsupportedError:
    """Error about inputs that differ between two ranks.

    Args:
        doing: What has begun.
        ranks: Global ranks.
        has_other_shapes: Whether shapes or dtypes differ, and not only values.
    """
    how = "tensors of other shapes or dtypes" if has_other_shapes else "tensors of the same shapes with other values"
    return UnsupportedError(
        f"Ranks {min(ranks)} and {max(ranks)} are in {doing} with different inputs ({how}). They are ranks of one "
        "replica, of which each computes a part of the model, so all of them must call it with the same tensors. "
        "Samples that a script deals out by `dist.get_rank()`, and noise or masks of a generator that the ranks do not "
        "seed alike, are the usual reasons: deal them out by replica (`accelerator.process_index`, "
        "`trainer.strategy.distributed_sampler_kwargs`), give all of them to every rank, or seed the generator."
    )
