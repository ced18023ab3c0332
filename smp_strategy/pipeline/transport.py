"""Moving tensors between the stages of one replica.

A send returns at once, and whatever later changes its tensor in place cannot reach the message
(:mod:`smp_strategy.pipeline.wire_format`). A receive is posted when it is known and waited for when it is needed;
nobody is woken for one that is there by then.

gloo matches messages of a pair of ranks by tag, so messages may overtake each other. Those of accelerators go by way of
the host (:mod:`smp_strategy.distributed.host_copies`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.background_wait import BackgroundWaits
from smp_strategy.distributed.deadlock import watch_of
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.failure import raise_lost
from smp_strategy.distributed.host_copies import HostCopies, Landed
from smp_strategy.distributed.message_tags import NUM_SHARED_RESULTS, SHARED_RESULTS
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.distributed.wait_positions import Condition
from smp_strategy.distributed.work import Work
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline import wire_format as messages

__all__ = ["Agreement", "Receipt", "Transport"]

_END = "the end of a step or hook"


@final
class Receipt:
    """A receive that is under way.

    Args:
        key: global rank of the sender, and the tag.
        work: the message, unpacked.
        transport: whose it is.
    """

    def __init__(self, key: tuple[int, int], work: Work[Landed], transport: "Transport") -> None:
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


class Agreement(NamedTuple):
    """A comparison of programs that is under way."""

    is_reached: Callable[[], bool]
    """Whether they are known to be the same by now."""
    check: Callable[[], None]
    """Waits, and raises :class:`UnsupportedError` if they differ, with the first difference. Only at the end of a step,
    where the others will come."""


@final
class Transport:
    """Point-to-point messages among the stages of this rank's replica.

    Args:
        stage_ranks: global rank of each stage.
        group: process group of the replica's stages.
        timeout: longest wait for a message; ``None``: that of the group's backend.

    Attributes:
        listeners: wait for messages that are not there yet.
        seconds_waited: how long this stage has been blocked by messages so far.
        sent: channel and tag of every message that was sent in this step, or for which there is a receive.
    """

    def __init__(self, stage_ranks: Sequence[int], group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self._ranks = stage_ranks
        self._timeout = timeout or timedelta(0)  # what torch takes for "none given"
        self._group = group
        self._peers = [dist.get_group_rank(group, rank) for rank in stage_ranks]
        # By receiver's stage and tag.
        self._sent: dict[tuple[int, int], Work[object]] = {}
        self._copies: dict[torch.device, HostCopies] = {}
        self._num_shared = 0
        self.seconds_waited = 0.0
        self.sent: set[tuple[str, int]] = set()
        self._rank, self._watch = dist.get_rank(), watch_of()
        # Names of messages to each stage, and of receives from it, in what is told of this rank.
        self._channels = [_channel(self._rank, rank) for rank in stage_ranks]
        self._expected = [_expected(rank, self._rank) for rank in stage_ranks]
        self._watch.senders.add(self)
        self.listeners = BackgroundWaits()
        # gloo writes to the memory of each until it has come, even if nobody waits for it any more.
        self._receipts: set[Receipt] = set()

    def send(self, tensor: Tensor, spec: TensorSpec, stage: int, tag: int) -> None:
        """Begin to send ``tensor``, whose metadata ``stage`` expects to be ``spec``."""
        message = messages.pack(tensor, spec)
        if is_host(message.device):
            self._sent[stage, tag] = self._start(message, stage, tag)
        else:
            copy = self._copies_of(message.device).out(message)
            started = Work(lambda: self._start(copy.wait(), stage, tag))
            self.listeners.expect(started)
            self._sent[stage, tag] = started.then(lambda sent: sent.wait())
        self.sent.add((self._channels[stage], tag))

    def _start(self, message: Tensor, stage: int, tag: int) -> Work[object]:
        """Begin to send memory of the host."""
        try:
            # What `dist.isend` and `dist.irecv` come to, without their checks: there are two of them per hop.
            work = self._group.send([message], self._peers[stage], tag)
        except RuntimeError as error:
            raise_lost(error, self._ranks[stage], "sending a tensor to")
        timeout = self._timeout

        def wait(_: Tensor = message) -> object:  # which must live until then
            return work.wait(timeout)

        return Work(wait)

    def receive(self, spec: TensorSpec, stage: int, tag: int) -> Receipt:
        """Begin to receive a tensor with the metadata ``spec``."""
        host = messages.on_host(spec)
        copies = None if host is spec else self._copies_of(spec.device)
        with outside_inference_mode():  # it may be used outside of the one that it is first needed in
            nbytes = messages.bytes_of(spec)
            message = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if copies is None else copies.memory(nbytes)
        incoming = messages.Incoming(message, host)
        try:
            work = self._group.recv([message], self._peers[stage], tag)
        except RuntimeError as error:
            raise_lost(error, self._ranks[stage], "waiting for a tensor from")
        timeout = self._timeout

        def wait() -> Landed:
            work.wait(timeout)
            arrived = incoming.tensor()
            return Landed(arrived) if copies is None else copies.back(arrived)

        receipt = Receipt((self._ranks[stage], tag), Work(wait, incoming.is_there), self)
        self._receipts.add(receipt)
        self.sent.add((self._expected[stage], tag))
        if copies is not None:
            receipt.listen()  # so that the copy to the device begins as soon as it can
        return receipt

    def _copies_of(self, device: torch.device) -> HostCopies:
        if device not in self._copies:
            self._copies[device] = HostCopies(device)
        return self._copies[device]

    def wait(self, receipt: Receipt) -> Landed:
        """Block until the message of ``receipt`` is there."""
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
        """In here this stage can do nothing until one of ``receipts`` arrives."""
        keys, rank = [receipt.key for receipt in receipts], self._rank
        return self._watch.waiting(
            lambda: [[Condition(source, _channel(source, rank), tag)] for source, tag in keys],
            self._group,
            "a tensor of another stage",
        )

    def poll(self) -> None:
        """Called again and again inside of :meth:`waiting_for`, if nothing is waited for there.

        Raises:
            ApartError: none of them can arrive.
        """
        self._watch.poll()

    def confirm(self, stage: int, tag: int) -> None:
        """Let go of the message that was sent to ``stage`` under ``tag``, once it has arrived; again does nothing."""
        if (stage, tag) in self._sent:
            sent = self._sent.pop((stage, tag))
            try:
                receiver = self._ranks[stage]
                needs = [[Condition(receiver, _expected(self._rank, receiver), tag)]]
                with self._watch.waiting(lambda: needs, self._group, "the arrival of a tensor at another stage"):
                    sent.wait()
            except RuntimeError as error:
                raise_lost(error, self._ranks[stage], "waiting for the arrival of a tensor at")

    def flush(self) -> None:
        """Confirm everything that was sent."""
        for stage, tag in list(self._sent):
            self.confirm(stage, tag)
        self.sent.clear()

    def close(self) -> None:
        """End the threads."""
        self.listeners.close()

    def begin_to_agree(self, digest: int, path: Callable[[], Sequence[str]]) -> "Agreement":
        """Begin to compare the programs that the stages have run; collective.

        Args:
            digest: of what this stage ran, equal if it is the same.
            path: the calls that it made.
        """
        mine = torch.tensor([digest], device="cpu")
        found = [torch.full_like(mine, -1) for _ in self._ranks]
        compared = collectives.all_gather(found, mine, group=self._group, doing=_END)

        def is_reached() -> bool:
            return compared.is_done() and all(torch.equal(mine, other) for other in found)

        def check() -> None:
            if is_reached():
                return
            compared.wait()
            if is_reached():
                return
            # A stage that has run something else may still be in its step, and wait for this one.
            paths = collectives.gather_objects((self._rank, list(path())), "a comparison of steps", self._group)
            raise UnsupportedError(_first_difference(dict(paths)))

        return Agreement(is_reached, check)

    def begin_to_share(
        self, values: Sequence[Tensor | None], specs: Sequence[TensorSpec], stage: int
    ) -> Callable[[], list[Tensor]]:
        """Begin to give every stage the tensors that ``stage`` has; one message per kind. Collective.

        Args:
            values: the tensors on ``stage``; ``None`` elsewhere.
            specs: their metadata, known everywhere.
            stage: who has them.

        Returns:
            What waits for them.
        """
        begun: list[tuple[list[int], Callable[[], Tensor]]] = []
        for kind in dict.fromkeys((spec.dtype, spec.device) for spec in specs):
            members = [index for index, spec in enumerate(specs) if (spec.dtype, spec.device) == kind]
            here = [value.detach().reshape(-1) for value in (values[index] for index in members) if value is not None]
            flat = TensorSpec((sum(specs[index].numel for index in members),), (1,), *kind, False)
            begun.append((members, self._begin_to_share_flat(here, flat, stage)))

        def wait() -> list[Tensor]:
            results = [torch.empty(0)] * len(specs)
            for members, flat in begun:
                pieces = flat().split([specs[index].numel for index in members])
                for index, piece in zip(members, pieces, strict=True):
                    # Each result owns its memory: a small one must not keep all others alive.
                    results[index] = piece.view(specs[index].size).clone()
            return results

        return wait

    def _begin_to_share_flat(self, here: Sequence[Tensor], spec: TensorSpec, stage: int) -> Callable[[], Tensor]:
        """Begin to give every stage what is ``here``, on ``stage``, behind each other."""
        tag = SHARED_RESULTS + self._num_shared % NUM_SHARED_RESULTS
        self._num_shared += 1
        if not here:
            return self.receive(spec, stage, tag).wait
        flat = torch.cat(list(here))
        for other in range(len(self._ranks)):
            if other != stage:
                self.send(flat, spec, other, tag)
        return lambda: flat


def _channel(source: int, target: int) -> str:
    """Of messages between stages."""
    return f"stage on {source} to {target}"


def _expected(source: int, target: int) -> str:
    """Of receives of such messages."""
    return f"{target} expects from {source}"


def _first_difference(paths: Mapping[int, Sequence[str]]) -> str:
    calls = zip_longest(*paths.values(), fillvalue="the end of the step")
    number, differing = next((n, call) for n, call in enumerate(calls) if len(set(call)) > 1)
    what = ", ".join(f"`{name}` on rank {rank}" for rank, name in sorted(zip(paths, differing, strict=True)))
    return (
        f"The ranks of this pipeline did not run the same code in this step: call {number} is {what}. A value that "
        "only some ranks read (`if trainer.is_global_zero: print(loss.item())`) or a branch on the rank is the usual "
        "reason: do it on all ranks, or use `self.log` or `self.print`."
    )
