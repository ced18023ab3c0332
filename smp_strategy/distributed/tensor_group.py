"""``TensorGroup``: collectives among the ranks of a tensor-parallel group.

Split layers ask their group for sums and concatenations. Nothing is sent where there are no values (fake tensors
predict shapes and costs, meta tensors wait for values), nor while one rank alone measures the cost of a layer: the
result has the right shape, dtype and memory, which is all that counts there.

Every message is started in the order of the calls, which is the same on all ranks of the group.

Before the first message of a step, and before each in a hook, ranks compare their positions (:meth:`TensorGroup.begin`,
:meth:`TensorGroup.in_hook`): a rank in other code would join the wrong collective, or leave the others waiting.
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
from smp_strategy.distributed.agreement.ledger import Ledger, Topic
from smp_strategy.distributed.agreement.same_inputs import NO_INPUTS, InputDigest, looks_closely, rounded
from smp_strategy.distributed.agreement.topics import CALL_INPUTS, INPUTS
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import SMPError

__all__ = ["TensorGroup"]

# [Note: positions of a group's ranks]
#
# gloo and NCCL match collectives by order alone. If one rank of a group is in a training step and another in a hook, in
# validation, or past an exception, their all-reduces would match by accident: wrong numbers, or a hang. So before the
# first message at a position ranks compare where they are:
#
#   step       once per step. If the last step has sent something, the comparison is begun with the step and awaited by
#              the first message, so that it costs no round trip; without messages the next step awaits it.
#   hook       before each message, because some ranks may skip any part of a user's code
#   meeting    once for all messages inside, which all ranks are known to send
#   alone      never: nothing is sent

Memory = TypeVar("Memory")

_MOST_COMPARED = 256
"""Elements of an input that ranks compare."""
_SPLIT = "parts of layers that are split"
_KNOWN = "what ranks know of split layers"


@final
class TensorGroup:
    """The ranks of a tensor-parallel group.

    Args:
        process_group: Their process group; ``None``: nothing is ever sent (for a rank that has all of each layer, and
            for predictions of one rank's work).
        rank, size: Rank of this process and number of ranks, without a process group.

    Attributes:
        rank, size: As given.
        sent_bytes: Bytes of its own that this rank has put into collectives.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, rank: int = 0, size: int = 1) -> None:
        self._group = process_group
        self.rank, self.size = rank, size
        if process_group is not None:
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.sent_bytes = 0
        self._memories: dict[type, Any] = {}
        self._is_alone = process_group is None
        self._position, self._is_agreed = "layers that are split", False
        self._is_in_hook = False
        self._inputs = NO_INPUTS
        self._num_steps = 0
        # Inputs of split layers in this step, each as a number.
        self._entered: list[tuple[str, Tensor]] = []
        self._ledger = Ledger()

    def begin(self, what: str, inputs: InputDigest = NO_INPUTS) -> None:
        """Begin a step; on all ranks of the group.

        Ranks in other code would join the same sums, or others, by mistake. So ranks compare their positions before the
        first message of the step. If the last step has sent something, this one is expected to, too, and the comparison
        runs in the background until then.

        Args:
            what: Name of the step, to follow "waits for" in messages.
            inputs: Digest of its inputs, if all ranks must have the same.
        """
        # See [Note: positions of a group's ranks]. `_is_agreed` still says whether the last step has sent something.
        if self._ledger.is_open:  # unused, because the last step has sent nothing
            self._ledger.check()
        elif self._is_agreed and not (self._is_in_hook or self._is_alone):
            self._begin_comparison(what, inputs)
        self._position, self._inputs, self._is_agreed = what, inputs, False
        self._num_steps += 1
        self._entered.clear()

    def note_entered(self, name: str, whole: Tensor) -> None:
        """Note the input of a split layer, which all ranks must have alike, whatever code around it has drawn."""
        is_noted = self._inputs != NO_INPUTS and looks_closely(self._num_steps) and not self._is_in_hook
        if not is_noted or self._is_alone or whole.is_meta or isinstance(whole, FakeTensor):
            return
        with torch.no_grad():
            some = whole.detach().reshape(-1)[:: max(whole.numel() // _MOST_COMPARED, 1)].float()
            # Of one sign, so that rounding counts for little, and other numbers in another order are another sum.
            places = torch.arange(1, len(some) + 1, device=some.device)
            self._entered.append((name, ((some.abs() + some.relu()) * places).sum()))

    def note_inputs(
        self, inputs: Sequence[tuple[str, int, float]], losses: Sequence[tuple[str, int, float]] = ()
    ) -> None:
        """Let the next comparison include calls with tensors that all ranks must have alike, digests of these, and
        losses. The first difference is told: what goes into the model before what follows from it."""
        entered, self._entered = self._entered, []
        if self._inputs == NO_INPUTS:
            return
        values = torch.stack([value for _, value in entered]).tolist() if entered else []
        found = [(name, *rounded(value, torch.float32)) for (name, _), value in zip(entered, values, strict=True)]
        self._ledger.note(CALL_INPUTS, [*inputs, *found, *losses])

    def settle(self) -> None:
        """Compare what the last step has noted, before values leave the ranks. Collective."""
        if self._group is not None and self.size > 1:
            self._ledger.settle(_SPLIT)

    @contextmanager
    def in_hook(self) -> Iterator[None]:
        """Context for user code that some ranks may skip.

        Ranks compare their positions before each collective, or once for those of one :meth:`meeting`.
        """
        before = self._position, self._is_agreed, self._is_in_hook
        self._position, self._is_agreed, self._is_in_hook = "values of split layers in a hook", False, True
        try:
            yield
        finally:
            self._position, self._is_agreed, self._is_in_hook = before

    @contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """Context in which all ranks of the group do the same; in a hook they compare their positions first.

        Args:
            what: Name of the action, as for :meth:`begin`.

        Raises:
            ApartError: Other ranks do something else.
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
        """All-gather of one number; ``what`` and errors as for :meth:`meeting`."""
        return [number] if self.size == 1 else collectives.gather_numbers(number, what, self._backend)

    def _agree(self) -> None:
        """Wait until all ranks are known to be at the same position.

        Raises:
            ApartError: They are not.
        """
        # In a hook the next message is compared again; in a step one comparison is enough.
        self._is_agreed = not self._is_in_hook
        if self._is_in_hook:
            collectives.barrier(self._position, self._group)
            return
        if not self._ledger.is_open:
            self._begin_comparison(self._position, self._inputs)
        self._ledger.check()

    def _begin_comparison(self, what: str, inputs: InputDigest) -> None:
        self._ledger.note(INPUTS, (what, *inputs)).begin(what, self._backend)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which nothing is sent, because the other ranks do not take part."""
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

    def start_sum(self, tensor: Tensor) -> Handle[object] | None:
        """Begin an all-reduce of ``tensor`` in place; wait for the returned handle before using it.

        Args:
            tensor: Contiguous, of one shape on all ranks; gets the sum, bitwise equal on all ranks.
        """
        if not self.sends(tensor):
            return None
        self.sent_bytes += tensor.nbytes
        return collectives.all_reduce(tensor, group=self._group, doing=_SPLIT)

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce of ``tensor`` (contiguous) in place; returns it."""
        if (work := self.start_sum(tensor)) is not None:
            work.wait()
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum of the ranks' ``tensor`` (contiguous), in place; returns it."""
        if self.sends(tensor):
            self.sent_bytes += tensor.nbytes
            collectives.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, doing=_SPLIT).wait()
        return tensor

    def all_of(self, is_so: bool) -> bool:
        """Whether something is true on all ranks."""
        if self.size == 1:
            return is_so
        return not self.maximum(torch.tensor([not is_so], dtype=torch.uint8, device="cpu")).item()

    def gather(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """All-gather of parts of different lengths.

        Args:
            part: This rank's part; ``part.shape[dim] == lengths[rank]``.
            dim: Dim of concatenation.
            lengths: Lengths of the ranks' parts along ``dim``.
        """
        shapes = [_with(part.shape, dim, length) for length in lengths]
        if not self.sends(part):
            others = [part if rank == self.rank else part.new_zeros(shape) for rank, shape in enumerate(shapes)]
            return torch.cat(others, dim)
        self.sent_bytes += part.nbytes
        # Padded to one size: all backends can exchange that.
        longest = max(math.prod(shape) for shape in shapes)
        own, found = part.new_empty(longest), part.new_empty(self.size * longest)
        if part.numel() == longest and part.is_contiguous():
            own = part.view(-1)
        else:
            _begin_of(own, part.shape).copy_(part)
        # As bytes, since backends lack some dtypes. (The names of the public functions change between releases.)
        group, sent = self._backend, own.view(torch.uint8)
        collectives.begin(_SPLIT, group, lambda: group._allgather_base(found.view(torch.uint8), sent)).wait()
        rows = found.view(self.size, longest)
        return torch.cat([_begin_of(row, shape) for row, shape in zip(rows, shapes, strict=True)], dim)

    def scatter_sum(self, whole: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Reduce-scatter: this rank's part of the sum of the ranks' ``whole``.

        Args:
            whole: Of one shape on all ranks; ``whole.shape[dim] == sum(lengths)``.
            dim: Dim along which the sum is cut.
            lengths: Lengths of the ranks' parts along ``dim``.
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
        # Detached, so that autograd does not take it for a view: it may be changed in place.
        return _begin_of(total, parts[self.rank].shape).detach()

    @property
    def _backend(self) -> dist.ProcessGroup:
        assert self._group is not None
        return self._group

    def objects(self, value: Any) -> list[Any]:
        """All-gather of ``value``, any object that can be pickled."""
        return [value] if self.size == 1 else collectives.gather_objects(value, _KNOWN, self._group)

    def compare(self, topic: Topic, value: Any) -> None:
        """Compare ``value``, or raise the error of ``topic``."""
        Ledger().note(topic, value).compare(_KNOWN, self._group)

    def remember(self, memory: object) -> None:
        """Store ``memory`` for layers that are called later, replacing the last one of its class."""
        self._memories[type(memory)] = memory

    def recall(self, kind: type[Memory]) -> Memory | None:
        """The stored memory of this class."""
        return self._memories.get(kind)

    def forget(self, kind: type) -> None:
        """Drop the stored memory of this class."""
        self._memories.pop(kind, None)

    def close(self) -> None:
        """Release the process group; nothing can be sent afterwards."""
        self._group = None
        self._ledger.clear()
        self._is_agreed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied layer belongs to the same ranks.
        return self


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = length
    return sizes


def _begin_of(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """First elements of ``flat``, as many as ``shape`` needs, in that shape."""
    return flat[: math.prod(shape)].view(shape)
