"""Local autograd graph: the real tensors of one microbatch on one stage, and their way across segment borders.

Autograd runs here and only here. Inside a segment tensors are ordinary; a tensor that enters a segment (received from
another stage, or made by an earlier segment of this one) is cut off its graph, and both ends of the cut are kept for
backward (see :mod:`smp_strategy.pipeline.segments`).
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.routing import MOST_MOVES, Move, Placement
from smp_strategy.pipeline.segments import Export, Import, Remote, Segment, enter
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.transport.transport import Receipt

__all__ = ["LocalGraph"]


@final
class LocalGraph:
    """Real tensors and segments of one microbatch on one stage.

    Args:
        pause: hands control to the scheduler. Called with the receives that the program waits for; called with none
            right before it computes for the first time, where a microbatch that has only begun early must stop.

    Attributes:
        segments: segments so far, the last one running.
        glue: exports of the glue's own graph.
    """

    def __init__(self, stage: Stage, microbatch: int, pause: Callable[[Sequence[Receipt]], None]) -> None:
        self.segments = [Segment(0)]
        self.glue = Segment(-1)
        self._stage = stage.number
        self._cuts_glue = stage.num_stages > 1
        self._microbatch = microbatch
        self._transport = stage.transport
        self._pause = pause
        self._worked = False
        self._begun = False

    @property
    def current(self) -> int:
        """Number of the running segment."""
        return self.segments[-1].index

    def begin_work(self) -> None:
        """Note that this stage is about to compute; may pause."""
        if not self._begun:
            self._begun = True
            self._pause([])
        self._worked = True

    def exchange(self, placement: Placement, placed: Sequence[PlacedTensor]) -> None:
        """Send the values that other stages need for an event, and wait for those that this one needs."""
        tensors = {tensor.value.id: tensor for tensor in placed}
        waiting: list[tuple[Move, PlacedTensor, Receipt]] = []
        for move in placement.moves:
            tensor = tensors[move.value.id]
            if move.source.stage == self._stage:
                self._send(move, tensor)
            elif move.target.stage == self._stage:
                assert self._transport is not None
                receipt = self._transport.receive(tensor.spec, move.source.stage, self._tag(move))
                waiting.append((move, tensor, receipt))
        if waiting:
            self._wait_for(waiting)

    def real(self, leaf: Any) -> Any:
        """The real tensor for ``leaf`` in the running segment; other leaves are unchanged."""
        if isinstance(leaf, PlacedTensor):
            return self._local(leaf)
        if self._cuts_glue and isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            return self._enter(self.glue.export(id(leaf), leaf))
        return leaf

    def cross(self, segment: int, tensor: Tensor) -> Tensor:
        """The running segment's copy of a weight that code of a unit has computed in ``segment``."""
        # A negative key: no value has such a number.
        return self._enter(self.segments[segment].export(-1 - id(tensor), tensor))

    def end(self) -> None:
        """Free exported values at the end of the program; only its backward is still to come."""
        for segment in (*self.segments, self.glue):
            for export in segment.exports.values():
                export.let_go()

    def close(self) -> None:
        """Release everything."""
        self.segments.clear()
        self.glue.exports.clear()
        self._pause = _ended

    def _send(self, move: Move, tensor: PlacedTensor) -> None:
        assert self._transport is not None
        assert tensor.origin is not None
        segment, real = tensor.origin
        self._worked = True
        self._transport.send(real, tensor.spec, move.target.stage, self._tag(move))
        if real.requires_grad:
            export = self.segments[segment].export(tensor.value.id, real)
            export.uses.append(Remote(move.target.stage, self._tag(move), tensor.spec))

    def _wait_for(self, waiting: Sequence[tuple[Move, PlacedTensor, Receipt]]) -> None:
        if self._worked:
            self.segments.append(Segment(len(self.segments)))
            self._worked = False
        segment = self.segments[-1]
        assert segment.index == waiting[0][0].target.number, "the segments of the run and of the rule have diverged"
        self._begun = True
        self._pause([receipt for _, _, receipt in waiting])
        for move, tensor, receipt in waiting:
            # Does not block in a turn, where Ctrl-C could not end it: the runner waits for the receives of a program
            # before it resumes it. Only a program without a runner (a hook) blocks here.
            real = receipt.wait()
            if tensor.spec.requires_grad:
                imported = Import(tensor.value.id, Remote(move.source.stage, self._tag(move), tensor.spec))
                segment.imports.append(imported)
                real = enter(real, imported)
            tensor.origin = tensor.current = (segment.index, real)

    def _tag(self, move: Move) -> int:
        # Even for the value; the gradient on the way back has the next odd number.
        return 2 * (self._microbatch * MOST_MOVES + move.number)

    def _local(self, placed: PlacedTensor) -> Tensor:
        assert placed.current is not None
        assert placed.origin is not None
        segment, tensor = placed.current
        if segment != self.current:
            origin_segment, origin = placed.origin
            if tensor.requires_grad:
                tensor = self._enter(self.segments[origin_segment].export(placed.value.id, origin))
            placed.current = (self.current, tensor)
        return tensor

    def _enter(self, export: Export) -> Tensor:
        imported = Import(export.value, None)
        export.uses.append(imported)
        self.segments[-1].imports.append(imported)
        return enter(export.tensor, imported)


def _ended(receipts: Sequence[Receipt]) -> None:
    raise AssertionError("a program was resumed after its step")
