"""Optimizer probe: twins of an optimizer that step on stand-ins, and from them the size of its state.

Any optimizer may be used, so properties are found by trying: a twin with the same options steps on a small stand-in of
a parameter. To predict the bytes of state before the first step, each dim of the stand-in has a size of its own, so the
shape of a state tensor tells which dims it follows: for a parameter of 5 x 7 a moment is 5 x 7, the rows of Adafactor
are 5 x 1.

Nothing that a twin does may reach the original, its parameters or its schedulers, wherever the optimizer stores things:
groups, attributes with parameters in them (LBFGS), an inner optimizer that shares its groups (SAM, Lookahead). So
everything is copied. In the copies the stand-in replaces the parameter, an empty parameter without a gradient replaces
the others, and there is no state.
"""

import copy
import itertools
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.fake_call import Meter
from smp_strategy.model.trace.flops import KernelTally
from smp_strategy.model.trace.working_bytes import working_bytes

__all__ = [
    "StateSize",
    "moments",
    "optimizer_state_bytes",
    "optimizer_state_sizes",
    "step_by_values",
    "take_step",
    "twin_of",
    "twin_with",
    "with_inner",
]

# Options that change how a step is computed, not its result; some are for accelerators only.
_HOW = ("capturable", "foreach", "fused")


def twin_of(optimizer: Optimizer, parameter: Tensor, stand_in: nn.Parameter) -> Optimizer:
    """Twin with the options that ``parameter`` has in ``optimizer``, for ``stand_in`` alone."""
    return twin_with(optimizer, {parameter: stand_in})


def twin_with(optimizer: Optimizer, stand_ins: Mapping[Tensor, nn.Parameter]) -> Optimizer:
    """Twin with the options that each parameter has in ``optimizer``, for its stand-in, and for no others."""
    members = with_inner(optimizer)
    nothing = nn.Parameter(next(iter(stand_ins.values())).detach().new_empty(0))
    memo: dict[int, Any] = {}
    for member in members:
        memo[id(member)] = object.__new__(type(member))
        memo[id(vars(member).get("state"))] = defaultdict(dict)
        for group in _groups(member):
            memo.update(zip(map(id, group["params"]), itertools.repeat(nothing)))
            memo[id(group["params"])] = [stand_ins[each] for each in group["params"] if each in stand_ins]
    memo.update((id(parameter), stand_in) for parameter, stand_in in stand_ins.items())
    memo.pop(id(None), None)
    for member in members:
        _fill(memo[id(member)], member, memo)
        _begin_state(memo[id(member)])
        if callable(begin := getattr(memo[id(member)], "train", None)):  # the original may be in evaluation mode
            begin()
    twin: Optimizer = memo[id(optimizer)]
    return twin


def step_by_values(twin: Optimizer) -> None:
    """Make steps as large as values, whatever the learning rates are: warm-ups begin at zero."""
    for group in twin.param_groups:
        if isinstance(rate := group.get("lr"), (int, float, Tensor)):
            group["lr"] = torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0


def take_step(twin: Optimizer, closure: Callable[[], Tensor] | None = None) -> None:
    """Step the twin, without other effects: the random generator is restored."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        twin.step() if closure is None else twin.step(closure)  # type: ignore[arg-type]


def _begin_state(twin: Optimizer) -> None:
    """Initialise state as the constructor does: under torch 2.11 Adagrad has some before its first step."""
    if type(twin) is not Adagrad:
        return
    for group in twin.param_groups:
        for parameter in group["params"]:
            total = torch.full_like(parameter, group["initial_accumulator_value"])
            twin.state[parameter] = {"step": torch.tensor(0.0), "sum": total}


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and all optimizers in its attributes, recursively."""
    found = [optimizer]
    for member in found:  # which grows
        own = {name: value for name, value in vars(member).items() if name not in ("param_groups", "state")}
        inner = (leaf for leaf in pytree.tree_leaves(own) if isinstance(leaf, Optimizer))
        found += dict.fromkeys(each for each in inner if each not in found)
    return found


def _groups(optimizer: Optimizer) -> Iterable[dict[str, Any]]:
    return vars(optimizer).get("param_groups", ())


def _fill(twin: Optimizer, original: Optimizer, memo: dict[int, Any]) -> None:
    for name, value in vars(original).items():
        # Schedulers put a method of the original on it, and so do others.
        if not (callable(value) and callable(getattr(type(original), name, None))):
            vars(twin)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    step = type(twin).step
    if getattr(step, "hooked", False):  # by what others have hung on the steps of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    vars(twin)["step"] = MethodType(step, twin)
    if "param_groups" in vars(twin):
        twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    for group in _groups(twin):
        group.update({name: False for name in _HOW if name in group})


_log = logging.getLogger(__name__)

_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
MOMENTS_IF_UNKNOWN = 2


@final
@dataclass(frozen=True)
class StateSize:
    """Sizes of the state tensors of a parameter, and of temporary results of its update."""

    shapes: tuple[tuple[tuple[int, ...], int], ...]
    """For each state tensor its shape for the stand-in, and bytes per element."""
    temporary: int = 0
    """Bytes of temporary results per element of the parameter."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of state for a parameter of ``shape``, which has as many dims as the stand-in."""
        return sum(_scaled(of_state, shape) * itemsize for of_state, itemsize in self.shapes)

    def update_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of temporary results while the parameter is updated by itself."""
        return self.temporary * math.prod(shape)


def optimizer_state_bytes(optimizers: Iterable[Optimizer]) -> dict[int, int]:
    """Bytes of state after the first step, by ``id`` of the parameter; frozen parameters are left out."""
    parameters = {id(each): each for optimizer in optimizers for each in _trained(optimizer)}
    sizes = optimizer_state_sizes(optimizers)
    return {number: sizes[number].nbytes(parameter.shape) for number, parameter in parameters.items()}


def optimizer_state_sizes(optimizers: Iterable[Optimizer], in_pieces: Container[int] = ()) -> dict[int, StateSize]:
    """Sizes of state after the first step, by ``id`` of the parameter; frozen parameters are left out.

    If an optimizer cannot be probed, two moments per parameter are assumed.
    """
    found: dict[int, StateSize] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known: dict[object, StateSize] = {}
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                kind = (1 if id(parameter) in in_pieces else parameter.ndim, parameter.dtype)
                if kind not in known:
                    known[kind] = _ask(optimizer, parameter, *kind)
                before = found.get(id(parameter), StateSize(()))
                temporary = max(before.temporary, known[kind].temporary)
                found[id(parameter)] = StateSize(before.shapes + known[kind].shapes, temporary)
    return found


def moments(ndim: int, itemsize: int) -> StateSize:
    """Size of two moments, which is assumed if nothing is known."""
    return StateSize(((_SIZES[:ndim], itemsize),) * MOMENTS_IF_UNKNOWN)


def _trained(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _ask(optimizer: Optimizer, parameter: Tensor, ndim: int, dtype: torch.dtype) -> StateSize:
    stand_in = nn.Parameter(torch.ones(_SIZES[:ndim], dtype=dtype))
    stand_in.grad = torch.ones_like(stand_in)
    try:
        twin = twin_of(optimizer, parameter, stand_in)
        take_step(twin)
        # The second step has no state to make.
        tally = KernelTally(notes_products=True)
        with Meter(tally):
            take_step(twin)
        tensors = [leaf for leaf in twin.state[stand_in].values() if isinstance(leaf, Tensor)]
    except Exception as error:
        _log.debug(
            "%s cannot be asked what it keeps of %d-dimensional parameters (%s: %s). Two moments are assumed.",
            type(optimizer).__name__,
            ndim,
            type(error).__name__,
            error,
        )
        return moments(ndim, dtype.itemsize)
    shapes = tuple((tuple(tensor.shape), tensor.element_size()) for tensor in tensors)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    # Beside results as large as the parameter there may be some of a few elements.
    as_large = 0 if is_fused else working_bytes(tally.kernels, (), {}, {}) // stand_in.nbytes
    return StateSize(shapes, as_large * stand_in.itemsize)


def _scaled(shape: Sequence[int], real: Sequence[int]) -> int:
    """Elements of a state tensor with ``shape`` for the stand-in, for a parameter of shape ``real``."""
    sizes = dict(zip(_SIZES, real, strict=False))
    elements = 1
    for size in shape:
        elements *= _unfolded(size, sizes)
    return elements


def _unfolded(size: int, sizes: Mapping[int, int]) -> int:
    """Real size of a dim of a state tensor, which may be several flattened dims of the parameter."""
    found = 1
    for small, large in sizes.items():
        if size % small == 0:
            size, found = size // small, found * large
    return found * size
