"""The ranks that split layers between them, as their layers see them.

Layers ask their group for sums and concatenations over its ranks. Where there are no values (fake tensors predict
shapes and costs, meta tensors wait for values), and where one rank measures by itself what a layer costs, nothing is
sent: the result has the right shape, dtype and memory, and that is all that counts there.

Every message is started in the order of the calls, which is the same on all ranks of the group.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.work import Work
from smp_strategy.errors import SMPError

__all__ = ["TensorGroup"]

Memory = TypeVar("Memory")

_SPLIT = "parts of layers that are split"


@final
class TensorGroup:
    """The ranks of a tensor-parallel group.

    Args:
        process_group: their process group; ``None``: nothing is ever sent (to predict what one of them does).
        rank, size: of this process in the group, and of the group; ``None``: as ``process_group`` says.

    Attributes:
        rank, size: as given.
        sent_bytes: how many bytes of its own this rank has put into collectives.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, rank: int | None = None, size: int | None = None
    ) -> None:
        self._group = process_group
        self.rank = dist.get_rank(process_group) if rank is None else rank
        self.size = dist.get_world_size(process_group) if size is None else size
        self.sent_bytes = 0
        self._memories: dict[type, Any] = {}
        self._is_alone = process_group is None
        self._place, self._is_agreed = "layers that are split", False
        self._is_in_hook = False
        self._comparison: Work[None] | None = None

    def begin(self, what: str) -> None:
        """A step begins, on all ranks of the group.

        Ranks that are elsewhere would take part in the same sums, or in others by mistake. So before something is sent
        in it for the first time, ranks compare where they are. If the last step has sent something this one will, too,
        and the comparison is under way until then.

        Args:
            what: in words that go on from "waits for".
        """
        comparison, self._comparison = self._comparison, None
        if comparison is not None:  # the last step has sent nothing
            comparison.wait()
        elif self._is_agreed and not (self._is_in_hook or self._is_alone):
            self._comparison = collectives.compare_places(what, self._backend)
        self._place, self._is_agreed = what, False

    @contextmanager
    def in_hook(self) -> Iterator[None]:
        """Code of the user runs in here, which some ranks may leave out.

        So ranks compare where they are before each collective, or once for those of one :meth:`meeting`.
        """
        before = self._place, self._is_agreed, self._is_in_hook
        self._place, self._is_agreed, self._is_in_hook = "values of split layers in a hook", False, True
        try:
            yield
        finally:
            self._place, self._is_agreed, self._is_in_hook = before

    @contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """In here all ranks of the group do the same, and compare that now if they are in a hook.

        Args:
            what: that is, as for :meth:`begin`.

        Raises:
            ApartError: other ranks do something else.
        """
        if not self._is_in_hook or self._is_agreed or self._is_alone or self.size == 1:
            yield
            return
        collectives.barrier(what, self._backend)
        self._is_agreed = True
        try:
            yield
        finally:
            self._is_agreed = False

    def numbers(self, number: int, what: str) -> list[int]:
        """The ranks' ``number``; ``what`` and what is raised as for :meth:`meeting`."""
        return collectives.gather_numbers(number, what, self._backend)

    def _agree(self) -> None:
        """Make sure that the others are where this rank is.

        Raises:
            ApartError: they are not.
        """
        self._is_agreed = not self._is_in_hook
        if self._is_in_hook or self._comparison is None:
            collectives.barrier(self._place, self._group)
            return
        comparison, self._comparison = self._comparison, None
        comparison.wait()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing is sent in here: the other ranks do not come along."""
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before

    def sends(self, tensor: Tensor) -> bool:
        """Whether collectives over ``tensor`` reach other ranks."""
        if self._is_alone or self.size == 1 or tensor.is_meta or isinstance(tensor, FakeTensor):
            return False
        if self._group is None:
            raise SMPError("Layers that are split over ranks compute together, but their process group is closed.")
        if not self._is_agreed:
            self._agree()
        return True

    def start_sum(self, tensor: Tensor) -> Work[object] | None:
        """Begin to add up the ranks' ``tensor`` in place; wait for what is returned before it is used.

        Args:
            tensor: contiguous, of one shape on all ranks; gets the sum, the same bits on all ranks.
        """
        if not self.sends(tensor):
            return None
        self.sent_bytes += tensor.nbytes
        return collectives.all_reduce(tensor, group=self._group, doing=_SPLIT)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' ``tensor`` (contiguous) in place, and return it."""
        if (work := self.start_sum(tensor)) is not None:
            work.wait()
        return tensor

    def most(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum of the ranks' ``tensor`` (contiguous), in place, and return it."""
        if self.sends(tensor):
            self.sent_bytes += tensor.nbytes
            collectives.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, doing=_SPLIT).wait()
        return tensor

    def gather(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The ranks' parts behind each other.

        Args:
            part: this rank's; ``part.shape[dim] == lengths[rank]``.
            dim: along which they stand.
            lengths: of the ranks' parts along ``dim``.
        """
        shapes = [_with(part.shape, dim, length) for length in lengths]
        if not self.sends(part):
            others = [part if rank == self.rank else part.new_zeros(shape) for rank, shape in enumerate(shapes)]
            return torch.cat(others, dim)
        self.sent_bytes += part.nbytes
        # Parts of one size are what all backends can exchange.
        longest = max(math.prod(shape) for shape in shapes)
        own, found = part.new_empty(longest), part.new_empty(self.size * longest)
        if part.numel() == longest and part.is_contiguous():
            own = part.view(-1)
        else:
            _begin_of(own, part.shape).copy_(part)
        # As bytes, since backends do not know all dtypes. (The public functions have other names in each release.)
        group, sent = self._backend, own.view(torch.uint8)
        collectives.begin(_SPLIT, group, lambda: group._allgather_base(found.view(torch.uint8), sent)).wait()
        rows = found.view(self.size, longest)
        return torch.cat([_begin_of(row, shape) for row, shape in zip(rows, shapes, strict=True)], dim)

    def scatter_sum(self, whole: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """This rank's part of the sum of the ranks' ``whole``.

        Args:
            whole: of one shape on all ranks; ``whole.shape[dim] == sum(lengths)``.
            dim: along which the sum is cut.
            lengths: of the ranks' parts along ``dim``.
        """
        parts = whole.split(list(lengths), dim)
        if not self.sends(whole):
            return parts[self.rank].clone()
        self.sent_bytes += whole.nbytes
        longest = max(part.numel() for part in parts)
        sent, total = whole.new_empty(self.size * longest), whole.new_empty(longest)
        for row, part in zip(sent.view(self.size, longest), parts, strict=True):
            _begin_of(row, part.shape).copy_(part)
        group, options = self._backend, dist.ReduceScatterOptions()
        collectives.begin(_SPLIT, group, lambda: group._reduce_scatter_base(total, sent, options)).wait()
        # Not a view, for autograd: it may be changed in place.
        return _begin_of(total, parts[self.rank].shape).detach()

    @property
    def _backend(self) -> dist.ProcessGroup:
        assert self._group is not None
        return self._group

    def objects(self, value: Any) -> list[Any]:
        """The ranks' ``value``, any that can be pickled."""
        return collectives.gather_objects(value, "what ranks know of split layers", self._group)

    def remember(self, memory: object) -> None:
        """Keep ``memory`` for layers that are called later, instead of the last one of its class."""
        self._memories[type(memory)] = memory

    def recall(self, kind: type[Memory]) -> Memory | None:
        """What is remembered of this class."""
        return self._memories.get(kind)

    def forget(self, kind: type) -> None:
        """What is remembered of this class is over."""
        self._memories.pop(kind, None)

    def close(self) -> None:
        """Let go of the process group: nothing can be sent any more."""
        self._group = self._comparison = None
        self._is_agreed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied layer is one of the same ranks.
        return self


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = length
    return sizes


def _begin_of(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """As much of ``flat`` as ``shape`` needs."""
    return flat[: math.prod(shape)].view(shape)
