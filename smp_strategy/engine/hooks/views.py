"""Hook views: the user's running hook sees the full model, across stages or over the shards of a single stage."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch

from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.data_parallel.optimizer_state import FullOptimizerState
from smp_strategy.engine.hooks.cross_stage import HookView
from smp_strategy.engine.hooks.cross_stage_inference import CrossStageInference
from smp_strategy.engine.hooks.full_parameters import FullParameters
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.surveys import alone
from smp_strategy.pipeline.transport.transport import Transport

__all__ = ["Views"]


@final
class Views:
    """View for the hook that runs now, if one does.

    Attributes:
        states: Full state of optimizers, for hooks.
        ask: Provides the values of guarded parameters outside of hooks; returns whether they are there for a while.
    """

    def __init__(self) -> None:
        self.states = FullOptimizerState()
        self.ask: Callable[[], bool] = lambda: False
        self._make: Callable[[], HookView | FullParameters] | None = None
        self._view: HookView | FullParameters | None = None
        self._depth = 0  # of contexts that put the view aside
        self._late: Callable[[], None] | None = None  # opens the view of a hook that has begun without one

    def begin(self, holdings: Holdings, full: FullParameters, transport: Transport | None) -> None:
        """Set up views of the partitioned module; see :class:`HookView`. ``transport=None``: a single stage."""
        inference = CrossStageInference(torch.device(holdings.mesh.device_type))
        self._make = lambda: full if transport is None else HookView(holdings, full, transport, inference)
        holdings.ownership.sight.ask = lambda: self._view is None and self.ask()
        holdings.sharded.answer(holdings.ownership.sight.ask)

    @property
    def is_open(self) -> bool:
        """Whether a hook runs."""
        return self._view is not None

    @contextmanager
    def opened(self, runtime: Runtime) -> Iterator[Callable[[Any], Any]]:
        """Context of a hook with a view; gives what makes its result real on every stage. Collective."""
        assert self._make is not None
        view = self._view = self._make()
        try:
            # Outside of the view: states are cut to shards last, when parameters are back in their places.
            with self.states.shown():
                if isinstance(view, FullParameters):
                    with view.shown():
                        yield lambda result: result
                else:
                    with alone(runtime, view.generators), view.shown():
                        yield partial(_real, view, runtime)
        finally:
            self._view = None

    def run_ahead(
        self,
        hook: Callable[[], Any],
        opened: Callable[[], AbstractContextManager[Callable[[Any], Any]]],
        is_ready: Callable[[], bool],
    ) -> Any:
        """Run ``hook``, begun before the module is partitioned, with a view once it is, after a step in the hook."""
        before, made = self._late, list[Callable[[Any], Any]]()
        with ExitStack() as stack:

            def late() -> None:
                if is_ready():
                    self._late = None
                    made.append(stack.enter_context(opened()))

            self._late = late
            try:
                result = hook()
                return made[0](result) if made else result
            finally:
                self._late = before

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Context inside of a hook in which the library and optimizers work on parameters as outside of hooks."""
        view, self._view = self._view, None
        self._depth += 1
        try:
            with nullcontext() if view is None else view.hidden(), self.states.hidden():
                yield
        finally:
            self._view = view
            self._depth -= 1
        if self._late is not None and not self._depth:
            self._late()

    def collected(self, tree: Any) -> Any:
        """``tree``, made by the running hook, with values on the first rank of the replica; collective."""
        return tree if self._view is None else self._view.collected(tree)

    def held(self, tree: Any) -> Any:
        """``tree``, made by the running hook, with a :class:`HeldTensor` for each tensor that lives on stages."""
        return self._view.held(tree) if isinstance(self._view, HookView) else tree


def _real(view: HookView, runtime: Runtime, result: Any) -> Any:
    """``result`` of a hook with values on every stage, all of which did the same."""
    view.agree()
    return runtime.stage.make_real(view.real(result))
