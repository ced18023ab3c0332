"""Interception of unit calls: they go through the runtime, while the user's hooks on units stay outside of it.

The ``forward`` of each unit is replaced on the instance, so ``unit(...)`` still runs its hooks, on every stage, with
placed tensors. Nothing else of the model is changed, and :meth:`UnitCalls.give_back` leaves no trace. Meanwhile,
collectives that the user calls outside of steps are watched.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.submodules import SubmoduleCalls
from smp_strategy.activations.unit_wrapper import UnitWrapper
from smp_strategy.distributed.agreement.same_inputs import compare_with_earlier, digest_of
from smp_strategy.errors import SMPError
from smp_strategy.model.guarded_tensors import in_plain_sight
from smp_strategy.model.patching import Patches
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.units import Unit
from smp_strategy.pipeline.dist_calls.user_collectives import WatchedCollectives
from smp_strategy.pipeline.isolation.written_values import KnownPlaces
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.wrapping.module_hooks import (
    hide_backward_hooks,
    hide_weight_hooks,
    refuse_new_weight_hooks,
    show_backward_hooks,
    show_weight_hooks,
    with_weight_hooks,
)
from smp_strategy.pipeline.wrapping.wrap_unit import holds
from smp_strategy.precision.mixed_precision import MixedPrecision

__all__ = ["UnitCalls"]


@final
class UnitCalls:
    """Intercepted units of a model, with the runtime that answers their calls.

    Attributes:
        runtime: Runtime that answers unit calls; ``None``: units run themselves, as if nothing had been replaced.
        exposed: Exposed attributes of units, and their uses.
        known_places: Knowledge about places that steps write to.
        outside: Answers unit calls outside of steps, given the unit's name and a function with the ordinary answer.
        written_weights: Parameters that code above the units writes to in steps, as far as known.
        written_lately: Those that the last dry run has written to, by id.
        in_hook: Whether a hook of the user runs, in which weights are watched: units must not notice that.
        program_of_hook: Interpreter of its code, which all stages run alike.
    """

    def __init__(self, mixed_precision: MixedPrecision | None = None) -> None:
        self.runtime: Runtime | None = None
        self.exposed = ExposedAttributes()
        self.known_places = KnownPlaces()
        self.mixed_precision = mixed_precision
        self.outside: Callable[[str, Callable[[], Any]], Any] | None = None
        self.in_hook = False
        self.program_of_hook: object = None
        self.written_weights: set[nn.Parameter] = set()
        self.written_lately: Mapping[int, nn.Parameter] = {}
        self._parts: SubmoduleCalls | None = None
        self._stand_ins = Patches()
        self._uncompiled = Patches()
        self._has_warned = False
        self._units: dict[str, nn.Module] = {}
        self._callees: dict[str, Callee] = {}
        self._forwards: dict[str, Callable[..., Any]] = {}
        self._weight_hooks: dict[str, dict[int, Callable[..., Any]]] = {}
        self._watched_collectives: WatchedCollectives | None = None

    @property
    def are_intercepted(self) -> bool:
        return bool(self._units)

    @property
    def are_in_step(self) -> bool:
        """Whether the user's step or a unit runs now, and no hook of the user in it."""
        return self._is_in_step and not self.in_hook

    def refuse_inside_of_step(self, what: str) -> None:
        """Raise if the user's step runs now, and no hook of the user in it."""
        if self.are_in_step:
            raise SMPError(f"{what} is asked for inside of a step. Ask after it: in a hook, or in a callback.")

    def unit_around(self, part: nn.Module) -> str | None:
        """Name of the unit that contains ``part``; ``None``: no unit does."""
        return next((name for name, unit in self._units.items() if holds(unit, part)), None)

    def intercept(self, units: Sequence[Unit], root: nn.Module) -> None:
        """Intercept calls of ``units`` of ``root``, and undo ``block.compile()`` of units and of modules above them.

        Their compiled calls contain their hooks and the stand-in for their forward, which leads out of compiled code.
        """
        self._watched_collectives = WatchedCollectives()
        inside = {id(part) for unit in units for part in unit.module.modules() if part is not unit.module}
        outer = {name: part for name, part in root.named_modules() if id(part) not in inside}
        compiled = {name: part for name, part in outer.items() if part._compiled_call_impl is not None}
        for part in compiled.values():
            self._uncompiled.put(part, "_compiled_call_impl", None)
        if compiled and not self._has_warned:
            self._has_warned = True
            name = next(iter(compiled)) or "the model"
            more = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
            warnings.warn(
                f"`{name}`{more} was compiled in place (`module.compile()`) and runs uncompiled: its calls are routed "
                "between stages. Set `compile=True`, which compiles the units, or use `torch.compile` for parts.",
                stacklevel=2,
            )
        for unit in units:
            self._intercept(unit)

    def give_back(self) -> None:
        """Undo the interception, and close the runtime."""
        self.close()
        if self._parts is not None:
            self._parts.give_back()
            self._parts = None
        self._stand_ins.give_back()
        self._uncompiled.give_back()
        for name, module in self._units.items():
            show_backward_hooks(module)
            show_weight_hooks(module, self._weight_hooks[name])
        self._units.clear()
        self._callees.clear()
        self._forwards.clear()
        self._weight_hooks.clear()
        if self.mixed_precision is not None:
            self.mixed_precision.let_go()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Context between steps in which units look as if they were not intercepted."""
        with ExitStack() as stack:
            if self._parts is not None:
                stack.enter_context(self._parts.lifted())
            stack.enter_context(self._stand_ins.lifted())
            for name, module in self._units.items():
                show_backward_hooks(module)
                show_weight_hooks(module, self._weight_hooks[name])
            try:
                yield
            finally:
                for module in self._units.values():
                    hide_backward_hooks(module)
                    hide_weight_hooks(module)

    def close(self) -> None:
        """Close the runtime's threads, and stop watching collectives."""
        if self._watched_collectives is not None:
            self._watched_collectives.close()
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None

    def _intercept(self, unit: Unit) -> None:
        hooks = self._weight_hooks[unit.name] = hide_weight_hooks(unit.module)
        original = self._forwards[unit.name] = with_weight_hooks(unit.module, unit.module.forward, hooks)
        exposed = tuple(self.exposed.found.get(unit.name, {}).values())
        runs = self._in_its_precision(unit.module, original)
        dtypes = None if self.mixed_precision is None else self.mixed_precision.dtypes_in
        self._callees[unit.name] = Callee(unit.name, runs, unit.module, exposed=exposed, dtypes=dtypes)

        def plainly(*args: Any, **kwargs: Any) -> Any:
            with in_plain_sight():
                return runs(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.outside is not None and not self._is_in_step:
                return self.outside(unit.name, lambda: answer(*args, **kwargs))
            return answer(*args, **kwargs)

        def answer(*args: Any, **kwargs: Any) -> Any:
            if self.runtime is None:
                return original(*args, **kwargs)
            callee = self._callees[unit.name]
            if self.in_hook:
                callee = dataclasses.replace(callee, function=plainly, compiled=None)
                self._compare_in_hook(unit.name, (args, kwargs))
            return self.runtime.call_unit(callee, args, kwargs)

        self._stand_ins.replace(unit.module, forward)
        self._units[unit.name] = unit.module
        hide_backward_hooks(unit.module)

    def refuse_new_weight_hooks(self) -> None:
        """Before a step: refuse pruning and older norms that were put on units since the units were distributed."""
        refuse_new_weight_hooks(self._units)

    def _compare_in_hook(self, name: str, inputs: Any) -> None:
        """Compare ``inputs`` of a unit that code of a hook calls, which no batch has brought."""
        assert self.runtime is not None
        program, transport = self.runtime.current.interpreter, self.runtime.stage.transport
        # Not in a step in a hook, nor inside of another unit.
        if transport is not None and program is self.program_of_hook and not self.runtime.is_in_unit:
            compare_with_earlier(digest_of(inputs), f"a call of `{name}` in a hook", transport.group)

    @property
    def _is_in_step(self) -> bool:
        return self.runtime is not None and (self.runtime.current.is_in_step or self.runtime.is_in_unit)

    def recompute_inside(
        self, parts: Mapping[str, tuple[nn.Module, ActivationPolicy]], activations: UnitWrapper, device: torch.device
    ) -> None:
        """Checkpoint ``parts``, submodules of units by name, each on its own: backward recomputes them."""
        self._parts = SubmoduleCalls(activations, device, lambda: self.runtime is not None and self.runtime.is_in_unit)
        self._parts.intercept(parts)

    def expose(self) -> None:
        """Make exposed attributes of units a part of what their calls return."""
        for name, places in self.exposed.found.items():
            self._callees[name] = dataclasses.replace(self._callees[name], exposed=tuple(places.values()))

    @property
    def exposed_parts(self) -> list[nn.Module]:
        """Submodules of units that have exposed attributes."""
        return [each.part for places in self.exposed.found.values() for each in places.values()]

    def compile(self, name: str) -> None:
        """Run the unit ``name`` through ``torch.compile`` from now on."""
        callee = self._callees[name]
        assert callee.module is not None
        compiled = self._in_its_precision(callee.module, torch.compile(self._forwards[name]))
        self._callees[name] = dataclasses.replace(callee, compiled=compiled)

    def _in_its_precision(self, unit: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.mixed_precision is None else self.mixed_precision.around(unit, function)
