"""Point-to-point send and receive of tensors between the stages of one replica.

A send returns at once, and later in-place changes of its tensor do not reach the message
(:mod:`smp_strategy.pipeline.transport.wire_format`). A receive is posted when it is known and waited for when it is
needed; no thread is woken for a message that has arrived by then.

Each message has a *header*, which gloo carries. gloo matches headers of a pair of ranks by tag, so messages may
overtake each other. The :class:`~smp_strategy.pipeline.transport.channel.Channel` to the other stage decides what else
there is: the header may contain the tensor or say where it is. Large headers take several
:class:`~smp_strategy.pipeline.transport.connections.Connections`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import count
from time import perf_counter
from typing import final

import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.background_wait import BackgroundWaits
from smp_strategy.distributed.deadlock import watch_of
from smp_strategy.distributed.failure import raise_lost
from smp_strategy.distributed.handle import Handle
from smp_strategy.distributed.host_copies import Landed, OnHost
from smp_strategy.distributed.message_tags import NUM_SHARED_RESULTS, SHARED_RESULTS
from smp_strategy.distributed.wait_positions import Condition
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import GLOO, Channel, GlooChannel
from smp_strategy.pipeline.transport.connections import Connections

__all__ = ["Receipt", "Transport"]


@final
class Receipt:
    """Handle of a posted receive.

    Args:
        key: global rank of the sender, and the tag.
        work: the message, unpacked.
    """

    def __init__(self, key: tuple[int, int], work: Handle[Landed], transport: "Transport") -> None:
        self.key = key
        self.work = work
        self._transport = transport
        self._is_listened_for = False

    def listen(self) -> None:
        """Wait for it in the background from now on."""
        if not self._is_listened_for:
            self._is_listened_for = True
            self._transport.listeners.expect(self.work)

    def arrived(self) -> bool:
        """Whether the tensor is there, without blocking."""
        if not self.work.is_done():
            self.listen()
        return self.work.is_done()

    def wait(self) -> Tensor:
        """Block until the tensor is there; the same one at each call."""
        return self._transport.wait(self).use()


@final
class Transport:
    """Point-to-point messages among the stages of this rank's replica.

    Args:
        channels: channel between this stage and each; ``None``: gloo carries all messages.
        more_groups: groups of the same stages for the pieces of large messages.

    Attributes:
        rank: global rank of this process.
        listeners: wait for messages that are not there yet.
        seconds_waited: how long this stage has been blocked by messages so far.
        result_tags: tags of results that a stage gives to all others; equal on all stages, which share in one order.
        sent: channel and tag of every message that was sent in this step, or for which there is a receive.
    """

    def __init__(
        self,
        stage_ranks: Sequence[int],
        group: dist.ProcessGroup,
        timeout: timedelta | None = None,
        channels: Sequence[Channel] | None = None,
        more_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.stage_ranks = stage_ranks
        self.channels = channels or [GlooChannel()] * len(stage_ranks)
        self.group = group
        self._connections = Connections(stage_ranks, [group, *more_groups], timeout)
        # By receiver's stage and tag.
        self._sent: dict[tuple[int, int], Handle[object]] = {}
        self.result_tags = (SHARED_RESULTS + number % NUM_SHARED_RESULTS for number in count())
        self.seconds_waited = 0.0
        self.sent: set[tuple[str, int]] = set()
        self.rank, self._watch = dist.get_rank(), watch_of()
        # Names of messages to each stage, and of receives from it, for the deadlock watch.
        self._outgoing = [_channel(self.rank, rank) for rank in stage_ranks]
        self._expected = [_expected(rank, self.rank) for rank in stage_ranks]
        self._watch.senders.add(self)
        self.listeners = BackgroundWaits()
        # Kept alive, even if nobody waits for one any more: see [Note: abandoned messages].
        self._receipts: set[Receipt] = set()

    def send(self, tensor: Tensor, spec: TensorSpec, stage: int, tag: int) -> None:
        """Begin to send ``tensor``, whose metadata ``stage`` expects to be ``spec``."""
        header = self.channels[stage].post(tensor, spec)
        if isinstance(header, OnHost):
            copy = header
            started = Handle(lambda: self._start(copy.wait(), spec, stage, tag))
            self.listeners.expect(started)
            self._sent[stage, tag] = started.then(lambda sent: sent.wait())
        else:
            self._sent[stage, tag] = self._start(header, spec, stage, tag)
        self.sent.add((self._outgoing[stage], tag))

    def _start(self, header: Tensor, spec: TensorSpec, stage: int, tag: int) -> Handle[object]:
        """Begin to send memory of the host."""
        try:
            return self._connections.send(header, stage, tag, spec.nbytes)
        except RuntimeError as error:
            raise_lost(error, self.stage_ranks[stage], "sending a tensor to")

    def receive(self, spec: TensorSpec, stage: int, tag: int) -> Receipt:
        """Post a receive of a tensor with the metadata ``spec``."""
        header = self.channels[stage].header(spec)
        try:
            arrival = self._connections.receive(header.memory, stage, tag, spec.nbytes)
        except RuntimeError as error:
            raise_lost(error, self.stage_ranks[stage], "waiting for a tensor from")

        def wait() -> Landed:
            arrival.wait()
            return header.take()

        # A header sees its own end only.
        is_cut = self._connections.number_of_pieces(min(header.memory.nbytes, spec.nbytes)) > 1
        is_there = None if is_cut else header.is_there
        receipt = Receipt((self.stage_ranks[stage], tag), Handle(wait, is_there), self)
        self._receipts.add(receipt)
        self.sent.add((self._expected[stage], tag))
        if header.goes_on:
            receipt.listen()  # so that the copy to the device begins as soon as it can
        return receipt

    def path_of(self, spec: TensorSpec, stage: int) -> str:
        """Name of the path of a tensor like ``spec`` between this stage and another."""
        path, pieces = self.channels[stage].path_of(spec), self._connections.number_of_pieces(spec.nbytes)
        return f"{path} on {pieces} connections" if path == GLOO and pieces > 1 else path

    def wait(self, receipt: Receipt) -> Landed:
        """Block until the message of ``receipt`` has arrived."""
        try:
            if receipt.work.is_done():  # that takes no thread
                landed = receipt.work.wait()
            else:
                receipt.listen()
                began = perf_counter()
                with self.waiting_for([receipt]):
                    landed = receipt.work.wait()
                self.seconds_waited += perf_counter() - began
        except RuntimeError as error:
            raise_lost(error, receipt.key[0], "waiting for a tensor from")
        self._receipts.discard(receipt)
        return landed

    def waiting_for(self, receipts: Sequence[Receipt]) -> AbstractContextManager[None]:
        """Context, for the deadlock watch, in which this stage is blocked until one of ``receipts`` arrives."""
        keys, rank = [receipt.key for receipt in receipts], self.rank
        return self._watch.waiting(
            lambda: [[Condition(source, _channel(source, rank), tag)] for source, tag in keys],
            self.group,
            "a tensor of another stage",
        )

    def confirm(self, stage: int, tag: int) -> None:
        """Wait until the message to ``stage`` under ``tag`` has arrived, and free it; a second call does nothing."""
        if (stage, tag) in self._sent:
            sent = self._sent.pop((stage, tag))
            try:
                receiver = self.stage_ranks[stage]
                needs = [[Condition(receiver, _expected(self.rank, receiver), tag)]]
                with self._watch.waiting(lambda: needs, self.group, "the arrival of a tensor at another stage"):
                    sent.wait()
            except RuntimeError as error:
                raise_lost(error, self.stage_ranks[stage], "waiting for the arrival of a tensor at")

    def flush(self) -> None:
        """Confirm all messages that were sent."""
        for stage, tag in list(self._sent):
            self.confirm(stage, tag)
        self.sent.clear()
        for channel in self.channels:
            channel.trim()

    def close(self) -> None:
        """End the threads, and free the memory of channels that no tensor is in."""
        self.listeners.close()
        for channel in self.channels:
            channel.close()


def _channel(source: int, target: int) -> str:
    """Name of messages between stages."""
    return f"stage on {source} to {target}"


def _expected(source: int, target: int) -> str:
    """Name of receives of such messages."""
    return f"{target} expects from {source}"
