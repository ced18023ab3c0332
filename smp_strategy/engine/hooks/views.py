"""Hook views: the user's running hook sees the full model, across stages or over the shards of a single stage."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

from torch import nn

from smp_strategy.data_parallel.full_optimizer_state import FullOptimizerState
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.hooks.cross_stage import HookView
from smp_strategy.engine.hooks.cross_stage_inference import CrossStageInference
from smp_strategy.engine.hooks.full_parameters import FullParameters, FullSplitLayers
from smp_strategy.model.ownership import Ownership
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.surveys import run_alone
from smp_strategy.pipeline.transport import Transport

__all__ = ["Views"]


@final
class Views:
    """View for the hook that runs now, if one does.

    Attributes:
        inference: Inference of results by metadata, shared by all views.
        states: Full state of optimizers, for hooks.
    """

    def __init__(self) -> None:
        self.inference = CrossStageInference()
        self.states = FullOptimizerState()
        self._make: Callable[[], HookView | FullParameters] | None = None
        self._view: HookView | FullParameters | None = None

    def begin(
        self,
        parameters: Sequence[nn.Parameter],
        ownership: Ownership,
        mesh: ProcessMesh,
        transport: Transport | None,
        *,
        sharded: ShardedModule | None,
        parts: FullSplitLayers | None,
    ) -> None:
        """Set up views of the partitioned module; see :class:`HookView`. ``transport=None``: a single stage."""

        def make() -> HookView | FullParameters:
            if transport is None:
                return FullParameters(sharded, parts)
            return HookView(parameters, ownership, mesh, transport, self.inference, sharded=sharded, parts=parts)

        self._make = make

    @property
    def is_open(self) -> bool:
        """Whether a hook runs."""
        return self._view is not None

    def run(self, hook: Callable[[], Any], runtime: Runtime) -> Any:
        """Run ``hook`` with a view; its result has values on every stage. Calls of units go to ``runtime``."""
        assert self._make is not None
        view = self._view = self._make()
        try:
            # Outside of the view: states are cut to shards last, when parameters are back in their places.
            with self.states.shown():
                if isinstance(view, FullParameters):
                    with view.shown():
                        return hook()
                return run_alone(runtime, lambda _: view.run(hook), view.generators)
        finally:
            self._view = None

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Context inside of a hook in which the library and optimizers work on parameters as outside of hooks."""
        view, self._view = self._view, None
        try:
            with nullcontext() if view is None else view.hidden(), self.states.hidden():
                yield
        finally:
            self._view = view

    def collected(self, tree: Any) -> Any:
        """``tree``, made by the running hook, with values on the first rank of the replica; collective."""
        return tree if self._view is None else self._view.collected(tree)

    def held(self, tree: Any) -> Any:
        """``tree``, made by the running hook, with a :class:`HeldTensor` for each tensor that lives on stages."""
        return self._view.held(tree) if isinstance(self._view, HookView) else tree
