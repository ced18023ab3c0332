"""Shape inference: predict the result of a call from metadata alone, by a dry run on fake tensors.

A stage that does not run a call still needs its result: shapes, strides, dtypes, outputs that require a gradient,
inputs changed in place. The call runs once on fake tensors (no memory, no arithmetic), and the prediction is cached for
every later call with the same metadata. In steady state a call of a remote unit costs one dictionary look-up. Calls
that differ in sizes only are predicted by a formula (:mod:`smp_strategy.model.trace.size_formulas`).

The same dry run counts the costs of the call (:mod:`smp_strategy.model.trace.flops`, and bytes saved for backward) and
finds out whether it draws random numbers. If the code reads a value, see [Note: assumed values] in
:mod:`smp_strategy.model.trace.fake_call`.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_strategy.distributed.torch_private import plain_functions_and_modes
from smp_strategy.errors import SMPError
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes
from smp_strategy.model.trace.fake_call import (
    Meter,
    SharedTableError,
    call,
    fails_again,
    frozen_rng,
    imitate,
    specs_inside,
    stand_in,
    tensors_of,
    tracked,
    until_exchanged,
)
from smp_strategy.model.trace.flops import KernelTally
from smp_strategy.model.trace.parametrize_cache import uncached
from smp_strategy.model.trace.places import variables_of
from smp_strategy.model.trace.prediction import IMMUTABLE, Callee, Prediction, Unpredictable, describe, versions_of
from smp_strategy.model.trace.pytree import flatten_result, unflatten_call, without_validation
from smp_strategy.model.trace.saved_tensors import watching_kept
from smp_strategy.model.trace.side_effects import collector_key, containers_of_objects, is_object
from smp_strategy.model.trace.size_formulas import SizeFormulas, SymbolicSizes, shape_kind
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.tensor_spec import TensorSpec, storage_of
from smp_strategy.model.trace.undo_variables import MemoizedFunctions, hide_fakes, variables_restored

__all__ = ["ShapeInference"]

# Shapes that change from batch to batch must not fill the memory.
MOST_PREDICTIONS = 1 << 14
# See [Note: assumed values] in `fake_call.py`: one, several, none; as truth values true, true, false.
ASSUMPTIONS = (1, 3, 0)

_IS_TRAINING = attrgetter("training")
_NEEDS_GRADIENT = attrgetter("requires_grad")
_PLAIN_KINDS = frozenset(IMMUTABLE)


class _Symbols(NamedTuple):
    """A dry run with symbolic sizes."""

    sizes: SymbolicSizes
    others: Iterator[TensorSpec]
    """Metadata of the tensors in objects among the arguments."""

    def inside(self, _: TensorSpec) -> Tensor:
        """Fake tensor for the next tensor in an object."""
        return imitate(next(self.others))


@final
class ShapeInference:
    """Predicts calls by dry runs, with a cache of predictions.

    Args:
        device: Device of the real calls.
        kind_of: Equal for units that are built alike, which share predictions then unless they leave tensors in
            attributes: fast, and right for costs only. ``None``: each unit has its own.

    Attributes:
        rewritten: Names of parameters that their own units have written to in dry runs.
        written_buffers: Names of buffers that their own units have written to in dry runs.
        memoized: Functions whose caches dry runs leave without fake tensors.
    """

    def __init__(self, device: torch.device, *, kind_of: Callable[[nn.Module], object] | None = None) -> None:
        self.device = device
        self._kind_of = kind_of
        self._identities: dict[object, object] = {}
        self.rewritten = set[str]()
        self.written_buffers = set[str]()
        self.memoized = MemoizedFunctions()
        self._kind = device.type
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[object, Prediction | Unpredictable] = {}
        self._formulas = SizeFormulas()
        self._parts: dict[object, tuple[tuple[nn.Module, ...], tuple[nn.Parameter, ...]]] = {}

    def recall(self, callee: Callee, leaves: Sequence[Any], structure: Any) -> Prediction | Unpredictable | None:
        """The cached result of :meth:`predict` for this call, if there is one."""
        return self._known.get(self._key_of(callee, leaves, structure))

    def predict(
        self, callee: Callee, leaves: Sequence[Any], structure: Any, *, survey: ExposedAttributes | None = None
    ) -> Prediction | Unpredictable:
        """Predict ``callee(*args, **kwargs)`` for flattened arguments.

        Args:
            callee: Unit or operation.
            leaves: Flattened arguments; a tensor may be given by its :class:`TensorSpec`.
            structure: Structure for :func:`~smp_strategy.model.trace.pytree.unflatten_call`.
            survey: Records the tensors that a dry run leaves in attributes. Under a survey, dry runs also write to
                objects among the arguments, so that later uses are seen; the caller restores these.
        """
        key = self._key_of(callee, leaves, structure)
        prediction = self._known.get(key)
        if prediction is None:
            if len(self._known) >= MOST_PREDICTIONS:
                self._known.clear()
            specs = [TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            with _quiet():
                if survey is None:
                    prediction = self._by_formula(callee, specs, structure, key)
                else:
                    prediction = self._attempt(callee, specs, structure, survey)
                    if survey.has_left(str(callee.key)):
                        self._identities[callee.key] = callee.key
                        key = self._key_of(callee, leaves, structure)
            self._known[key] = prediction
        return prediction

    def _by_formula(
        self, callee: Callee, specs: list[Any], structure: Any, key: tuple[object, ...]
    ) -> Prediction | Unpredictable:
        """Predict a call from calls with other sizes, if there were any."""
        others, num_leaves = len(key) - len(specs), len(specs)
        try:
            inside = [spec for leaf in specs for spec in specs_inside(leaf)]
        except Exception:  # an object that cannot be copied, such as a generator of random numbers
            return self._attempt(callee, specs, structure, None)
        kind = (*key[:others], *map(shape_kind, [*specs, *inside], [*key[others:], *inside]))

        def run_symbolic(sizes: SymbolicSizes, leaves: list[Any]) -> Prediction:
            given, inside = leaves[:num_leaves], iter(leaves[num_leaves:])
            return self._dry_run(callee, given, structure, None, symbols=_Symbols(sizes, inside))

        return self._formulas.predict(
            kind, [*specs, *inside], lambda: self._attempt(callee, specs, structure, None), run_symbolic
        )

    def _key_of(self, callee: Callee, leaves: Sequence[Any], structure: Any) -> tuple[object, ...]:
        switches = () if callee.module is None else self._switches(callee.key, callee.module)
        # Modes of the thread that change the results of operations.
        autocast = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype())
        given = [leaf if type(leaf) is TensorSpec else _key(leaf) for leaf in leaves]
        return (self._identity(callee), structure, switches, modes, *given)

    def _identity(self, callee: Callee) -> object:
        if self._kind_of is None or callee.module is None:
            return callee.key
        if callee.key not in self._identities:
            self._identities[callee.key] = self._kind_of(callee.module)
        return self._identities[callee.key]

    def _switches(self, key: object, module: nn.Module) -> tuple[object, ...]:
        """Part of the cache key that may change between calls: training mode, frozen parameters, filled collectors."""
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = (tuple(module.modules()), tuple(module.parameters()))
        with plain_functions_and_modes():  # parameters of other stages are a subclass
            frozen = tuple(map(_NEEDS_GRADIENT, parts[1]))
        return tuple(map(_IS_TRAINING, parts[0])), frozen, collector_key()

    def _there(self, spec: TensorSpec) -> TensorSpec:
        """``spec`` on the device of the step, if it is a meta tensor: kernels are chosen by device."""
        return dataclasses.replace(spec, device=self.device) if spec.device.type == "meta" else spec

    def _attempt(
        self, callee: Callee, specs: list[Any], structure: Any, survey: ExposedAttributes | None
    ) -> Prediction | Unpredictable:
        lent = Snapshot(containers=containers_of_objects(specs) if survey else ())
        run = partial(self._dry_run, callee, specs, structure, survey)
        run_lent = partial(run, lends=survey is not None)
        try:
            return run_lent()
        except SharedTableError as error:
            lent.restore()
            return self._with_own_tables(error, callee, specs, structure, survey)
        except SMPError:
            raise
        except Exception as error:
            lent.restore()
            # Any error of the code counts: if it is a mistake of the user, the real run will raise it.
            if not fails_again(run_lent, error):
                raise
            unpredictable = Unpredictable(f"{type(error).__name__}: {error}")
        lent.restore()
        found = list[Prediction]()
        for run_assumed in (partial(run, assumed) for assumed in ASSUMPTIONS):
            try:
                found.append(run_assumed())
            except SMPError:
                raise
            except Exception as error:
                if not fails_again(run_assumed, error):
                    raise
                return unpredictable
        return found[0] if all(map(found[0].agrees, found)) else unpredictable

    def _with_own_tables(
        self,
        error: SharedTableError,
        callee: Callee,
        specs: list[Any],
        structure: Any,
        survey: ExposedAttributes | None,
    ) -> Prediction | Unpredictable:
        """Dry run of a unit that finds tables of other units, without them, as it will run on a stage of its own."""
        assert callee.module is not None
        hide_fakes(variables_of(callee.module.modules()).values())
        try:
            return self._dry_run(callee, specs, structure, survey, lends=survey is not None)
        except Exception:
            raise error from None

    @until_exchanged
    def _dry_run(
        self,
        callee: Callee,
        leaves: list[Any],
        structure: Any,
        survey: ExposedAttributes | None,
        assumed: int | None = None,
        *,
        lends: bool = False,
        symbols: _Symbols | None = None,
    ) -> Prediction:
        tensors = tensors_of(callee.module)
        modules = () if callee.module is None else tuple(callee.module.modules())
        noting: AbstractContextManager[None] = nullcontext()
        if survey is not None and callee.module is not None:
            noting = survey.noting(str(callee.key), callee.module)
        with (
            tracked(),
            uncached(),
            without_validation(),
            self.memoized.without_fakes(),
            nullcontext() if survey is not None else variables_restored(modules),
            frozen_rng() as python_drew,
            Snapshot(modules=modules, tensors_of=modules),
            self._mode if symbols is None else symbols.sizes.running(),
        ):
            leaves = [self._there(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves]
            inside = imitate if symbols is None else symbols.inside
            fakes = [leaf if lends and is_object(leaf) else stand_in(leaf, inside=inside) for leaf in leaves]
            dtypes = callee.dtype_of_weights()
            with plain_functions_and_modes():  # looking at the sizes of weights is no use of them
                specs = {name: self._there(_seen(tensor, dtypes.get(name))) for name, tensor in tensors.items()}
            stand_ins = {name: imitate(_in_full(spec), leaf=True) for name, spec in specs.items()}
            versions, homes = versions_of(fakes), {name: storage_of(fake) for name, fake in stand_ins.items()}
            # Costs are numbers, which would fix symbolic sizes.
            tally = KernelTally(stand_ins.values(), notes_products=True) if symbols is None else None
            meter = Meter(tally, assumed, None if callee.module is None else str(callee.key))
            args, kwargs = unflatten_call(fakes, structure)
            watching = nullcontext() if tally is None else watching_kept(stand_ins.values(), fakes, tally)
            with watching as watched, meter, noting:
                result = call(callee, stand_ins, args, kwargs)
            draws = meter.random or python_drew() or assumed is not None
            self.rewritten |= _rewritten(callee, stand_ins, homes, meter.written)
            buffers = () if callee.module is None else dict(callee.module.named_buffers())
            self.written_buffers |= {f"{callee.key}.{name}" for name in buffers if homes.get(name) in meter.written}
        # A unit that draws random numbers may return its input this time and something new the next.
        returns_inputs = not draws or callee.module is None
        costs = {}
        if tally is not None and watched is not None:
            kept = watched(flatten_result(result)[0])
            costs = {"effort": tally.efforts, "saved_bytes": kept.saved_bytes, "kept": kept}
        return describe(result, fakes, versions, returns_inputs=returns_inputs, random=draws, **costs)


def _rewritten(
    callee: Callee, stand_ins: Mapping[str, Tensor], homes: Mapping[str, int], written: Collection[int]
) -> set[str]:
    """Names of parameters whose storages were written to or exchanged (``weight.data = ...``)."""
    parameters = () if callee.module is None else [name for name, _ in callee.module.named_parameters()]
    return {
        f"{callee.key}.{name}"
        for name in parameters
        if homes[name] in written or storage_of(stand_ins[name]) != homes[name]
    }


def _seen(tensor: Tensor, dtype: torch.dtype | None) -> TensorSpec:
    """Metadata of a weight in the dtype that the unit sees."""
    spec = TensorSpec.of(tensor)
    return spec if dtype is None else dataclasses.replace(spec, dtype=dtype)


def _in_full(spec: TensorSpec) -> TensorSpec:
    """Metadata of a weight on its own stage; on others it is one element, expanded to the full shape.

    Kernel costs depend on the bytes, and every rank must find the same costs, since plans depend on them.
    """
    if any(stride for size, stride in zip(spec.size, spec.stride, strict=True) if size > 1):
        return spec
    return dataclasses.replace(spec, stride=torch.empty(spec.size, device="meta").stride())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's logs: calls that do not run on fake tensors are a normal result, and so are symbols."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.__trace")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def _key(leaf: Any) -> object:
    """Part of the cache key: properties of an argument that the result's metadata can depend on."""
    kind = type(leaf)
    if kind in _PLAIN_KINDS:
        return kind, leaf
    if isinstance(leaf, Tensor):
        return TensorSpec.of(leaf)
    if isinstance(leaf, IMMUTABLE):
        return kind, leaf
    if isinstance(leaf, dist.ProcessGroup):
        return leaf  # shapes of gathered tensors depend on its size
    if kind is slice:
        return slice, leaf.start, leaf.stop, leaf.step
    # Caches and other objects with a state are told apart by type only. The stage that runs the call compares the real
    # result with the prediction, so a wrong guess is an error and never a wrong number.
    return kind
