"""Backward of one microbatch on one stage, segment by segment.

Every stage knows from the program trace which gradients travel: a value's gradient comes back from exactly those stages
whose use of it leads to the loss. Receives for them are posted when the forward pass is complete. The gradients of
several uses are added in the order of autograd in a single process: the latest use first.

The backward of a segment may run in two parts: the gradients that other segments wait for, and later, at an action of
the plan, those of the weights (see :mod:`smp_strategy.pipeline.split_backward`).
"""

from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.job import check_loss
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.segments import Export, Import, Remote, Segment, edge_of
from smp_strategy.pipeline.split_backward import Deferred, backward_of_imports
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.transport.transport import Receipt

__all__ = ["MicrobatchBackward"]


@final
class MicrobatchBackward:
    """Runs the backward passes of one microbatch's segments, last one first.

    Args:
        program: program whose forward is complete.
        goes_on: whether the program continues after this backward, and may run another one.
        retain_graph: whether another backward may pass through the same graph.
    """

    def __init__(
        self,
        program: MicrobatchInterpreter,
        loss: Any,
        weight: float,
        stage: Stage,
        *,
        goes_on: bool = False,
        retain_graph: bool = False,
    ) -> None:
        check_loss(loss)
        self._program = program
        self._stage = stage.number
        self._transport = stage.transport
        self._backward = stage.backward
        self._goes_on = goes_on
        self._retain_graph = retain_graph
        self._next = len(program.graph.segments) - 1
        self._deferred: dict[int, Deferred] = {}
        self._seeds: dict[int, list[tuple[GradientEdge, Tensor]]] = {}
        self._receipts: dict[Remote, Receipt] = {}
        loss_value = loss.value.id if isinstance(loss, PlacedTensor) else None
        self._remote_uses = program.program_trace.returning(loss_value)
        self._plant(loss, weight, stage.number == stage.num_stages - 1)
        self._post_receives()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self._next < 0 and not self._deferred

    def awaited(self) -> list[Receipt]:
        """Receives of the gradients that the next segment starts from."""
        if self._next < 0:
            return []
        exports = self._program.graph.segments[self._next].exports.values()
        uses = [use for export in exports for use in export.uses if isinstance(use, Remote)]
        return [self._receipts[use] for use in uses if use in self._receipts]

    def run_next(self) -> None:
        """Run the last segment's outstanding backward pass, or else the deferred weight gradients."""
        if self._next >= 0:
            self.run_from(self._next)
        else:
            self.complete()

    def run_from(self, segment: int, *, split: bool = False) -> None:
        """Run the outstanding backward passes, from the last segment down to ``segment``; if ``split``,
        :meth:`run_weights` computes the gradients of weights later.
        """
        while self._next >= max(segment, 0):
            self._run(self._program.graph.segments[self._next], split=split)
            self._next -= 1
            self._end()

    def run_weights(self, segment: int) -> None:
        """Compute the weight gradients that the split backward of ``segment`` has left."""
        if (deferred := self._deferred.pop(segment, None)) is not None:
            deferred.run()
            self._end()

    def complete(self) -> None:
        """Run all outstanding work."""
        self.run_from(0)
        for segment in list(self._deferred):
            self.run_weights(segment)

    def _plant(self, loss: Any, weight: float, is_last_stage: bool) -> None:
        """Set the root of backward: the loss, on the stage that has it."""
        if isinstance(loss, PlacedTensor):
            if loss.origin is None or self._program.lives_on(loss) != self._stage:
                return
            segment, tensor = loss.origin
        elif is_last_stage and loss.requires_grad:
            # The loss depends on parameters of the glue only. Every stage has them, so one stage must do it alone: the
            # gradients of the stages are added up.
            segment, tensor = -1, loss
        else:
            return
        self._seeds[segment] = [(edge_of(tensor), torch.full_like(tensor, weight))]

    def _post_receives(self) -> None:
        for segment in self._program.graph.segments:
            for export in segment.exports.values():
                for use in export.uses:
                    if isinstance(use, Remote) and (export.value, use.stage) in self._remote_uses:
                        assert self._transport is not None
                        self._receipts[use] = self._transport.receive(use.spec, use.stage, use.tag + 1)

    def _end(self) -> None:
        """After the last segment, run the backward of the glue, which collects gradients from all segments."""
        if not self.is_done:
            return
        self._run(self._program.graph.glue)
        if not self._goes_on:
            # Frees the activations of this microbatch.
            self._program.graph.segments.clear()
            self._program.graph.glue.exports.clear()

    def _run(self, segment: Segment, *, split: bool = False) -> None:
        roots = self._seeds.pop(segment.index, [])
        for export in segment.exports.values():
            if (gradient := self._gradient(export)) is not None:
                roots.append((export.edge, gradient))
        if roots:
            edges, gradients = zip(*roots, strict=True)
            if split:
                if deferred := backward_of_imports(edges, gradients, self._waited_for(segment), self._backward):
                    self._deferred[segment.index] = deferred
            else:
                self._backward(edges, gradients, retain_graph=self._retain_graph)
        for imported in segment.imports:
            self._return(imported)
        if split:
            # The deferred part holds the tensors that it needs; the rest of the graph is freed now.
            segment.exports.clear()
            segment.imports.clear()

    def _waited_for(self, segment: Segment) -> set[Import]:
        """The imports of ``segment`` whose gradients are sent, or taken by an earlier segment."""
        of_glue = {use for export in self._program.graph.glue.exports.values() for use in export.uses}
        return {imported for imported in segment.imports if imported not in of_glue and self._is_wanted(imported)}

    def _is_wanted(self, imported: Import) -> bool:
        return imported.source is None or (imported.value, self._stage) in self._remote_uses

    def _gradient(self, export: Export) -> Tensor | None:
        """The sum of the gradients that the uses of ``export`` return; the latest use first, as autograd adds."""
        total: Tensor | None = None
        for use in reversed(export.uses):
            if isinstance(use, Import):
                part, use.grad = use.grad, None
            else:
                receipt = self._receipts.pop(use, None)
                part = receipt.wait() if receipt else None
                if receipt is not None and self._transport is not None:
                    # A gradient that is back means that the value has arrived.
                    self._transport.confirm(use.stage, use.tag)
            if part is not None:
                total = part if total is None else total + part
        return total

    def _return(self, imported: Import) -> None:
        """Send the gradient of a received value to where it came from; local ones are fetched by their export."""
        source = imported.source
        if source is None or not self._is_wanted(imported):
            return
        assert self._transport is not None
        gradient, imported.grad = imported.grad, None
        if gradient is None:
            # The value was an input of a unit that does not use it. The other stage cannot know that, and waits.
            gradient = torch.zeros(source.spec.size, dtype=source.spec.dtype, device=source.spec.device)
        self._transport.send(gradient, source.spec, source.stage, source.tag + 1)
