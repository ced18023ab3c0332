"""Mixed precision: units compute in half precision, on weights that are stored in float32.

Optimizers, hooks and checkpoints see the float32 *masters*; the unit's code sees half-precision weights under the same
names. So during a call the parameter slots of the unit's modules hold half-precision copies, and afterwards the masters
again. Floating-point arguments are cast too; results are not, so values that travel between stages take half of the
bytes. Autocast, under which code above the units may run, is off inside.

Copies are made once per optimizer step, not per microbatch: they are refilled when a step begins or the version of a
master has changed. They are leaves of autograd, so a gradient is passed on as soon as it exists (buckets wait for it),
and the weight gradient of a product can be delayed. A hook adds the half-precision gradient to the master's
in float32, and calls the hooks that users have registered on the master.

Weights that are sharded need no copy: they are gathered in half precision
(:mod:`smp_strategy.data_parallel.flat_buffer`), and a slot with such a weight is left alone. So is a slot with a fake
tensor of a dry run: shape inference and profiling create these in the dtype of :meth:`MixedPrecision.dtypes_in`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy as shallow_copy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.errors import UnsupportedError
from smp_strategy.precision.dtypes import FLOATS, compute_dtype, dtypes_in_use, kept_in_full

__all__ = ["MixedPrecision", "Casting"]


class _ParameterSlot(NamedTuple):
    """Slot of a parameter in a module."""

    of_module: dict[str, Any]
    name: str
    parameter: Tensor
    flat_weights: list[Any]
    """Second list of weights that recurrent modules keep."""
    positions: tuple[int, ...]
    """Positions of the parameter in that list."""

    def put(self, tensor: Tensor) -> None:
        self.of_module[self.name] = tensor
        for position in self.positions:
            self.flat_weights[position] = tensor


@final
class MixedPrecision:
    """Half-precision computation of units."""

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self._device_type = device_type
        self._copies: dict[int, _HalfCopy] = {}
        self._slots: dict[int, list[_ParameterSlot]] = {}

    @classmethod
    def asked_for(cls, options: PrecisionOptions, device_type: str) -> "MixedPrecision | None":
        """Mixed precision as ``options`` ask for it, if they do."""
        dtype = compute_dtype(options)
        return None if dtype is None else cls(dtype, device_type)

    def dtypes_in(self, unit: nn.Module) -> dict[str, torch.dtype]:
        """Parameters of ``unit`` that it sees in another dtype than they are stored in, by name."""
        return dtypes_in_use(unit, self.dtype)

    def around(self, unit: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function``, the forward of ``unit``, to compute in half precision."""

        def run(*args: Any, **kwargs: Any) -> Any:
            casting = Casting(self.dtype)
            args, kwargs = casting.of((args, kwargs))
            with self._halves_in(unit), self._without_autocast():
                result = function(*args, **kwargs)
            casting.finish(type(unit).__name__)
            return result

        return run

    def around_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the code above the units in autocast, so that losses come out in float32."""

        def run(microbatch: Any) -> Any:
            # No cache: an optimizer may step in here, and autocast would keep the casts of the old weights.
            with torch.autocast(self._device_type, self.dtype, cache_enabled=False):
                return step(microbatch)

        return run

    # Copies

    def keep(self, parameters: Collection[nn.Parameter]) -> None:
        """Keep copies of ``parameters``, which are complete on this rank, from their first use on."""
        self.let_go()
        self._copies = {id(each): _HalfCopy(each, self.dtype) for each in parameters if self._is_to_be_cast(each)}

    def let_go(self) -> None:
        """Free all copies."""
        for copy in self._copies.values():
            copy.let_go()
        self._copies.clear()
        self._slots.clear()

    def refresh(self) -> None:
        """Invalidate the copies.

        Masters may have new values that their versions do not show, or modules new parameters.
        """
        for copy in self._copies.values():
            copy.is_current = False
        self._slots.clear()

    @property
    def held_bytes(self) -> int:
        return sum(copy.half.nbytes for copy in self._copies.values() if copy.half is not None)

    @contextmanager
    def _halves_in(self, unit: nn.Module) -> Iterator[None]:
        slots = self._slots_in(unit)
        try:
            for slot in slots:
                slot.put(self._half_of(slot.parameter))
            yield
        finally:
            for slot in slots:
                slot.put(slot.parameter)

    def _half_of(self, parameter: Tensor) -> Tensor:
        copy = self._copies.get(id(parameter))
        if copy is not None:
            return copy.current()
        # Only traced runs come here: sharded weights are gathered in half precision, others have a kept copy.
        return parameter.to(self.dtype)

    def _slots_in(self, unit: nn.Module) -> list[_ParameterSlot]:
        known = self._slots.get(id(unit))
        if known is None or any(slot.of_module.get(slot.name) is not slot.parameter for slot in known):
            known = list(self._found_in(unit))
            if known and all(id(slot.parameter) in self._copies for slot in known):
                self._slots[id(unit)] = known
        return known

    def _found_in(self, unit: nn.Module) -> Iterator[_ParameterSlot]:
        full = set(map(id, kept_in_full(unit)))
        for part in unit.modules():
            flat, names = (part._flat_weights, part._flat_weights_names) if isinstance(part, nn.RNNBase) else ([], [])
            for name, parameter in part._parameters.items():
                positions = tuple(number for number, each in enumerate(names) if each == name)
                if parameter is None or id(parameter) in full:
                    continue
                # The list holds the real weights even where a dry run has put others into the module.
                if self._is_to_be_cast(parameter) or any(flat[each] is not parameter for each in positions):
                    yield _ParameterSlot(part._parameters, name, parameter, flat, positions)

    def _is_to_be_cast(self, parameter: Tensor) -> bool:
        return parameter.dtype is not self.dtype and parameter.dtype in FLOATS

    def _without_autocast(self) -> AbstractContextManager[Any]:
        if torch.is_autocast_enabled(self._device_type):
            return torch.autocast(self._device_type, enabled=False)
        return nullcontext()


@final
class _HalfCopy:
    """Half-precision copy of a master.

    Attributes:
        half: The copy, once it has been used.
        is_current: Whether it may have the master's values, as far as the master's version tells.
    """

    def __init__(self, master: nn.Parameter, dtype: torch.dtype) -> None:
        self._master = master
        self._dtype = dtype
        self._version = 0
        self.half: nn.Parameter | None = None
        self.is_current = False

    def current(self) -> nn.Parameter:
        """The copy, with the present values of the master."""
        master, half = self._master, self.half
        if half is None:
            half = self.half = self._made()
        elif self._version != master._version:
            with torch.inference_mode(False), torch.no_grad():
                # An in-place change that bumps the version: a graph that has saved the old values raises.
                half.copy_(master)
        elif not self.is_current:
            half.data.copy_(master.data)
        self._version, self.is_current = master._version, True
        if half.requires_grad != master.requires_grad:
            half.requires_grad_(master.requires_grad)
        return half

    def let_go(self) -> None:
        self.half, self.is_current = None, False

    def _made(self) -> nn.Parameter:
        with torch.inference_mode(False), torch.no_grad():
            half = nn.Parameter(self._master.detach().to(self._dtype))
        half.grad_dtype = None  # added to the master's as it comes
        half.register_post_accumulate_grad_hook(self._pass_on)  # also if frozen: it may be unfrozen later
        return half

    def _pass_on(self, half: Tensor) -> None:
        """Move a half-precision gradient to the master as if it had arrived there; the addition casts it."""
        master = self._master
        gradient, half.grad = half.grad, None
        assert gradient is not None
        if hooks := list((master._backward_hooks or {}).values()):
            gradient = gradient.to(master.dtype)
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        elif torch.is_grad_enabled():  # as autograd does it where a graph of gradients is wanted
            master.grad = master.grad + gradient
        else:
            master.grad.add_(gradient)
        for hook in list((master._post_accumulate_grad_hooks or {}).values()):
            hook(master)


# --- arguments -------------------------------------------------------------------------------------------------------
# Casting the arguments of a unit: floating-point tensors get another dtype, in nested containers too.
#
# Code may change its arguments. A list that it appends to gets the new items, although it was given another list with
# the cast tensors. An in-place change of a cast tensor would be lost, so it is refused. Code may also ask whether two
# arguments are the same object (attention asks of queries and keys): a tensor that occurs twice is cast once.


# Checked first, because most arguments have these types.
_PLAIN = frozenset({type(None), bool, int, float, str})


@final
class Casting:
    """Casts of the arguments of one call.

    Args:
        dtype: Target dtype of floating-point tensors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # By id of the original tensor: the cast tensor and its initial version.
        self._cast: dict[int, tuple[Tensor, int]] = {}
        self._after: list[Callable[[], None]] = []

    def of(self, value: Any) -> Any:
        """``value``, which holds all arguments, itself, or a copy of it where it holds tensors to be cast."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, dict):
            return self._of_dict(value)
        if kind is list:
            return self._of_list(value)
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(item is before for item, before in zip(items, value, strict=True)):
                return value
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._of_dataclass(value)
        return value

    def finish(self, name: str) -> None:
        """End of the call: write changes of containers back.

        Raises:
            UnsupportedError: The call has changed a cast argument in place.
        """
        for cast, version in self._cast.values():
            if _version_of(cast) != version:
                raise UnsupportedError(
                    f"`{name}` changes an argument of shape {list(cast.shape)} in place, which was cast to "
                    f"{self._dtype} for it (`bf16`, `fp16`), so that its caller would not see the change. Return a "
                    f"new tensor, or give it a tensor in {self._dtype}."
                )
        for put_back in self._after:
            put_back()

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is self._dtype or tensor.dtype not in FLOATS:
            return tensor
        if id(tensor) not in self._cast:
            cast = tensor.to(self._dtype)
            self._cast[id(tensor)] = cast, _version_of(cast)
        return self._cast[id(tensor)][0]

    def _of_list(self, given: list[Any]) -> list[Any]:
        before = [self.of(item) for item in given]
        if all(item is old for item, old in zip(before, given, strict=True)):
            return given
        known = {id(item): old for item, old in zip(before, given, strict=True)}
        now = list(before)

        def put_back() -> None:
            if len(now) != len(before) or any(item is not old for item, old in zip(now, before, strict=True)):
                given[:] = [known.get(id(item), item) for item in now]

        self._after.append(put_back)
        return now

    def _of_dict(self, given: dict[Any, Any]) -> dict[Any, Any]:
        before = {key: self.of(item) for key, item in given.items()}
        changed = [key for key, item in given.items() if before[key] is not item]
        if not changed:
            return given
        now = shallow_copy(given)  # of its own kind
        for key in changed:
            now[key] = before[key]

        def put_back() -> None:
            for key in before.keys() - now.keys():
                del given[key]
            given.update((key, item) for key, item in now.items() if key not in before or item is not before[key])

        self._after.append(put_back)
        return now

    def _of_dataclass(self, given: Any) -> Any:
        names = [field.name for field in dataclasses.fields(given) if hasattr(given, field.name)]
        items = {name: getattr(given, name) for name in names}
        changed = {name: new for name, item in items.items() if (new := self.of(item)) is not item}
        if not changed:
            return given
        made = shallow_copy(given)
        for name, item in changed.items():
            object.__setattr__(made, name, item)
        return made


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
