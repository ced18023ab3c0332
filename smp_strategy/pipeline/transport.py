"""Moving tensors between the stages of one replica.

Sender and receiver know the shape and dtype of every message from the program, so there are no headers. A message is
the raw elements in the order in which they stand in memory, and after them the strides: kernels add in another order
where the layout is another, and that of a gradient, or of a result whose prediction is wrong about it, is known to
the sender alone. A send copies its tensor first and returns at once; whatever later changes the tensor in place cannot
reach the message. A receive is posted when it is known and waited for when it is needed.

gloo matches messages of a pair of ranks by tag, so messages may overtake each other.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.errors import PeerFailedError
from smp_strategy.failure import blame
from smp_strategy.trace.spec import TensorSpec

__all__ = ["Receipt", "Transport", "empty"]


@final
class Receipt:
    """A receive that is under way."""

    def __init__(self, message: Tensor, spec: TensorSpec, work: dist.Work, source: int, timeout: timedelta) -> None:
        self._message = message
        self._spec = spec
        self._tensor: Tensor | None = None
        self._work: dist.Work | None = work
        self._source = source
        self._timeout = timeout
        self._arrival: Future[Tensor] | None = None

    def arrived(self, executor: Executor) -> bool:
        """Whether the tensor is there, without blocking. gloo cannot tell, so a thread waits for it."""
        if self._work is None:
            return True
        if self._arrival is None:
            self._arrival = executor.submit(self.wait)
        if self._arrival.done():
            self._arrival.result()
        return self._arrival.done()

    def wait(self) -> Tensor:
        """Block until the tensor is there; later calls return at once (gloo itself would wait for ever)."""
        if self._work is not None:
            _wait(self._work, self._source, "a tensor from", self._timeout)
            self._work = None
        if self._tensor is None:
            strides = self._message[self._spec.nbytes :].clone().view(torch.int64).tolist()
            self._tensor = _elements(self._message, self._spec, strides)
        return self._tensor


@final
class Transport:
    """Point-to-point messages among the stages of this rank's replica.

    Args:
        stage_ranks: global rank of each stage.
        group: process group of the replica's stages.
        timeout: longest wait for a message; ``None``: that of the group's backend.
    """

    def __init__(self, stage_ranks: Sequence[int], group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self._ranks = stage_ranks
        self._timeout = timeout or timedelta(0)  # what torch takes for "none given"
        self._group = group
        self._sent: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}

    def send(self, tensor: Tensor, spec: TensorSpec, stage: int, tag: int) -> None:
        """Begin to send ``tensor``, whose metadata ``stage`` expects to be ``spec``."""
        # Without the gaps and overlaps of a strided view.
        strides = torch.empty_like(tensor, device="meta").stride()
        message = _message(spec)
        _elements(message, spec, strides).copy_(tensor.detach())
        message[spec.nbytes :].copy_(torch.tensor(strides, dtype=torch.int64).view(torch.uint8))
        with _peer(self._ranks[stage], "sending a tensor to"):
            work = dist.isend(message, self._ranks[stage], group=self._group, tag=tag)
        assert work is not None
        self._sent[stage, tag] = (work, message)

    def receive(self, spec: TensorSpec, stage: int, tag: int) -> Receipt:
        """Begin to receive a tensor with the metadata ``spec``."""
        with torch.inference_mode(False):  # it may be used outside of the inference mode that it is first needed in
            message = _message(spec)
        with _peer(self._ranks[stage], "waiting for a tensor from"):
            work = dist.irecv(message, self._ranks[stage], group=self._group, tag=tag)
        assert work is not None
        return Receipt(message, spec, work, self._ranks[stage], self._timeout)

    def confirm(self, stage: int, tag: int) -> None:
        """Let go of the copy that was sent to ``stage`` under ``tag``, once it has arrived; again does nothing."""
        if (stage, tag) in self._sent:
            work, _ = self._sent.pop((stage, tag))
            _wait(work, self._ranks[stage], "the arrival of a tensor at", self._timeout)

    def flush(self) -> None:
        """Confirm everything that was sent."""
        for stage, tag in list(self._sent):
            self.confirm(stage, tag)

    def share(self, values: Sequence[Tensor | None], specs: Sequence[TensorSpec], stage: int) -> list[Tensor]:
        """Give every stage the tensors that ``stage`` has; one message per dtype.

        Args:
            values: the tensors on ``stage``; ``None`` elsewhere.
            specs: their metadata, known everywhere.
            stage: who has them.
        """
        results: list[Tensor] = [torch.empty(0)] * len(specs)
        for dtype in dict.fromkeys(spec.dtype for spec in specs):
            members = [index for index, spec in enumerate(specs) if spec.dtype == dtype]
            sizes = [specs[index].numel for index in members]
            flat = torch.empty(sum(sizes), dtype=dtype, device=specs[members[0]].device)
            pieces = flat.split(sizes)
            for index, piece in zip(members, pieces, strict=True):
                value = values[index]
                if value is not None:
                    piece.copy_(value.detach().reshape(-1))
                results[index] = piece.view(specs[index].size)
            with _peer(self._ranks[stage], "waiting for the results of"):
                dist.broadcast(flat, self._ranks[stage], group=self._group)
        # Each result owns its memory: a small one must not keep all others alive.
        return [result.clone() for result in results]


def empty(spec: TensorSpec) -> Tensor:
    """Memory for the elements of ``spec``, without the gaps and overlaps of a strided view."""
    layout = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
    return torch.empty_like(layout, device=spec.device)


def _message(spec: TensorSpec) -> Tensor:
    """Memory for the elements of ``spec`` and its strides."""
    return torch.empty(spec.nbytes + len(spec.size) * torch.int64.itemsize, dtype=torch.uint8, device=spec.device)


def _elements(message: Tensor, spec: TensorSpec, strides: Sequence[int]) -> Tensor:
    """The tensor in ``message``."""
    return message[: spec.nbytes].view(spec.dtype).as_strided(spec.size, strides)


def _wait(work: dist.Work, rank: int, what: str, timeout: timedelta) -> None:
    with _peer(rank, f"waiting for {what}"):
        work.wait(timeout)


@contextmanager
def _peer(rank: int, doing: str) -> Iterator[None]:
    """Turn a broken connection into the error of the rank that failed."""
    try:
        yield
    except RuntimeError as error:
        cause = blame(error)
        if cause is not error:
            raise cause from error
        raise PeerFailedError(
            f"While {doing} rank {rank}, the connection failed: {error}\n"
            f"Rank {rank} stopped or is stuck; its own output says why."
        ) from error
