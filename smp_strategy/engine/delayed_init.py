"""Deferred initialisation: a module built on the meta device gets memory only for the tensors that a rank holds.

Before the first step every rank has the full module, but shapes only. After the partition, this rank's share gets
memory and values, piece by piece if the caller wishes, so that a rank never needs more than its share and one piece.
The rest stays without values. Parameters keep their identity, so optimizers built earlier stay valid.

Values come from the modules' own initialisers (:mod:`smp_strategy.model.initial_values`), from files of a pretrained
model that were not read yet (:mod:`smp_strategy.model.deferred_tensor`), or from a state dict that was loaded
meanwhile: it is referenced, not copied. Or the caller fills them in from files, once there is memory.

Layers may be split meanwhile (:mod:`smp_strategy.tensor_parallel`). Then a rank gets its parts of the full layers'
values, which are made, or looked up in the state dict, one module at a time.

No value may be lost silently. Before the first step an error names the tensors that no initialiser fills, and those
with changes on the meta device that initialisers do not repeat (a constructor that scales some weights after its layers
are built). Tensors count in-place changes even without memory; the count must not exceed that of a rehearsal of the
initialisers on the meta device.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_tensor import DeferredTensor, ReadRun, lacks_values, own_values, run_of, undefer
from smp_strategy.model.initial_values import (
    Initialisers,
    leave_meta,
    ordinary,
    places_of,
    unset,
    without_memory,
    zero_values,
)
from smp_strategy.model.units import Unit
from smp_strategy.tensor_parallel.split_module import SplitModule

__all__ = ["DelayedModule"]

# Maximum number of names in an error.
MOST_NAMES = 5


@final
class DelayedModule:
    """Tensors of a module that are on the meta device, until they get values. Does nothing if there are none.

    Args:
        seed: Seed of the values, the same on all ranks.

    Attributes:
        has_made_values: Whether some tensors had no values before the first step.
    """

    def __init__(self, root: nn.Module, seed: int, device: torch.device) -> None:
        self._root = root
        self._seed = seed
        self.device = device
        self.has_made_values = False
        self._names = _on_meta(root)
        self._pending = dict(self._names)
        self._loaded: dict[Tensor, Tensor] = {}
        self._expected: set[Tensor] = set()
        self._initialisers: Initialisers | None = None
        self._split = SplitModule.none()
        self._handles = _remember_loads(root, self._pending, self._loaded)

    @property
    def is_pending(self) -> bool:
        """Whether there are tensors without memory."""
        return bool(self._pending)

    def parts(self, units: Sequence[Unit]) -> dict[str, list[Tensor]]:
        """Tensors without memory by unit, and under ``""`` those of no unit; a tied tensor belongs to several units."""
        of_units = {unit.name: [tensor for tensor in unit.tensors if tensor in self._pending] for unit in units}
        inside = {tensor for tensors in of_units.values() for tensor in tensors}
        return {"": [tensor for tensor in self._pending if tensor not in inside], **of_units}

    def prepare(self, units: Sequence[Unit], optimizers: Sequence[Optimizer] = ()) -> None:
        """Before the first step: ensure that all tensors will get values, and give values to those of no unit.

        Raises:
            UnsupportedError: some would get none, or not those that the constructor gave them.
        """
        for tensor, source in _take_deferred(self._root).items():
            self._loaded.setdefault(tensor, source)  # a state dict that was loaded since takes precedence
        # Hooks may have replaced tensors since construction.
        self._names = _on_meta(self._root)
        self._pending.clear()
        self._pending.update(self._names)
        if not self._pending:
            return
        self.has_made_values = True
        with ordinary():
            self._initialisers = Initialisers(self._root, self._seed, self.device)
            problems = [*self._rehearse(), *_meta_attributes(self._root), *_meta_states(optimizers)]
        if problems:
            raise UnsupportedError(
                "The module is on the meta device, where tensors have no values, and cannot leave it:\n"
                + "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
            )
        self.materialise(self.parts(units)[""])

    def materialise(self, tensors: Iterable[Tensor]) -> None:
        """Give memory and values to those of ``tensors`` that have none.

        The values do not depend on which other tensors get some, or when.

        Raises:
            UnsupportedError: initialisers fill only a part of a tensor.
        """
        wanted = [tensor for tensor in dict.fromkeys(tensors) if tensor in self._pending]
        if not wanted:
            return
        assert self._initialisers is not None, "prepare comes first"
        with ordinary():
            self._read(wanted)
            fresh = self._fresh(wanted)
            for tensor in wanted:
                if tensor.is_meta:
                    # Known values fill all of it, so it needs no marks of gaps.
                    is_known = tensor in self._loaded
                    leave_meta(tensor, unset(tensor, self.device, marks=not is_known))
            with self._split.appearance.dense():
                partial = self._initialisers.run(fresh, self._take)
            for tensor in wanted:
                if (whole := self._loaded.pop(tensor, tensor)) is not tensor:
                    self._take(tensor, whole)
        if partial:
            names = [self._names[tensor] for tensor in partial]
            raise UnsupportedError(f"Initialisers leave a part of {_listed(names)} without values. {_REMEDY}")
        self._forget(wanted)

    def runs(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, ReadRun]:
        """Let those of ``parameters`` of which runs can be read leave the meta device without memory; returns what
        reads runs of their values, in the order of memory, for memory that the caller has for them.
        """
        found: dict[nn.Parameter, ReadRun] = {}
        for parameter in dict.fromkeys(parameters):
            source = self._loaded.get(parameter) if parameter in self._pending else None
            is_split = self._split.parts.has(parameter)
            if isinstance(source, DeferredTensor) and parameter.is_contiguous() and not is_split:
                found[parameter] = partial(run_of, source)
        self.pass_over(found)
        return found

    def expect(self) -> None:
        """Let all tensors without memory get it without values: the caller will fill them in."""
        self._expected.update(self._pending)

    @property
    def expected(self) -> dict[Tensor, str]:
        """Tensors without memory that the caller will fill in, with names."""
        return {tensor: name for tensor, name in self._pending.items() if tensor in self._expected}

    def take(self, values: Mapping[Tensor, Tensor]) -> None:
        """Take full values for tensors without memory, as from a state dict."""
        self._loaded.update(values)
        self._expected.difference_update(values)

    def pretending(self) -> AbstractContextManager[None]:
        """Context in which all tensors have values, zeros in hardly any memory, so that an observed step can run."""
        return zero_values(self._pending, self.device)

    def divide(self, split: SplitModule) -> None:
        """Layers were split: tensors will get this rank's part of their full values."""
        self._split = split

    def settle(
        self,
        is_held: Callable[[Tensor], bool],
        *,
        later: Collection[Tensor] = (),
        copies: Iterable[nn.Module] = (),
    ) -> None:
        """Give values to the tensors that this rank holds; the others leave the meta device without values.

        Args:
            is_held: Whether this rank holds a tensor of the module.
            later: Tensors that the caller will give to :meth:`materialise`, piece by piece.
            copies: Modules with the same names (averages of weights, say), which get the same values.
        """
        if not self._pending:
            return
        copies = list(copies)
        sources = {tensor: source for copy in copies for tensor, source in _take_deferred(copy).items()}
        delayed = [(name, each) for copy in copies for name, each in _named_tensors(copy).items() if each.is_meta]
        # Copies need full values at once, so materialising piece by piece would save no memory.
        later = () if delayed else later
        self.pass_over([tensor for tensor in self._pending if not is_held(tensor)])
        self.materialise([tensor for tensor in self._pending if tensor not in later])
        named = _named_tensors(self._root)
        for name, tensor in delayed:
            self._copy(sources.get(tensor, named[name]), tensor, is_here=is_held(named[name]))

    def pass_over(self, tensors: Iterable[Tensor]) -> None:
        """Let ``tensors`` leave the meta device without memory: their values are on other ranks."""
        passed = [tensor for tensor in dict.fromkeys(tensors) if tensor in self._pending]
        with ordinary():
            for tensor in passed:
                leave_meta(tensor, without_memory(tensor, self.device))
        self._forget(passed)

    def refuse_saving(self) -> None:
        """Refuse to save before there are values.

        Raises:
            UnsupportedError: there are none.
        """
        if self._pending:
            raise UnsupportedError(
                f"The model is to be saved before its first step, but {_listed(list(self._pending.values()))} of it "
                "is on the meta device and gets its values in the first step. Save it later."
            )

    def _read(self, tensors: Iterable[Tensor]) -> None:
        """Give those of ``tensors`` that are deferred, and not split, the memory that their values are read into."""
        for tensor in tensors:
            source = self._loaded.get(tensor)
            if isinstance(source, DeferredTensor) and (source.shape, source.dtype) == (tensor.shape, tensor.dtype):
                leave_meta(tensor, own_values(source).to(self.device))
                self._loaded[tensor] = tensor

    def _rehearse(self) -> list[str]:
        """Run all initialisers on the meta device; returns their problems as text."""
        assert self._initialisers is not None
        fresh = self._fresh(self._pending)
        rehearsal = self._initialisers.rehearse()
        found = []
        without = [self._names[tensor] for tensor in fresh if tensor not in rehearsal.filled]
        if without:
            found.append(f"No initialiser gives values to {_listed(without)}. {_REMEDY}")
        # Changes of `tensor.data` are not counted, neither here nor before.
        more = [tensor for tensor in fresh if 0 < rehearsal.filled.get(tensor, 0) < tensor._version]
        if more:
            found.append(
                f"{_listed([self._names[tensor] for tensor in more])} was changed on the meta device by more than its "
                "initialisers: by a constructor, a hook or a state dict, which would be lost. Do it in "
                "`reset_parameters()` of the module that does it (a container, too), or build that part on a real "
                'device: `with torch.device("cpu"): ...`.'
            )
        if rehearsal.passed_over:
            found.append(
                f"{_listed(rehearsal.passed_over)} was not made on the meta device like the rest of its model, which "
                "has initialised nothing there. Give it values in place (by `torch.nn.init`, say), or build the model "
                "on a real device."
            )
        return found

    def _fresh(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of ``tensors`` whose values come from initialisers."""
        return [tensor for tensor in tensors if tensor not in self._loaded and tensor not in self._expected]

    def _take(self, tensor: Tensor, whole: Tensor) -> None:
        if isinstance(whole, DeferredTensor):
            whole = own_values(whole)  # once, though parts of it are copied one by one
        self._split.parts.fill(tensor, whole)

    def _copy(self, original: Tensor, tensor: Tensor, *, is_here: bool) -> None:
        with ordinary():
            values = self._whole(original) if is_here else without_memory(tensor, self.device)
            leave_meta(tensor, values)

    def _whole(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeferredTensor):
            return own_values(tensor).to(self.device)
        return self._split.parts.join(tensor, tensor)

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._pending.pop(tensor)
            self._loaded.pop(tensor, None)
            self._expected.discard(tensor)
        if not self._pending:
            for handle in self._handles:
                handle.remove()
            self._handles, self._initialisers = [], None


_REMEDY = (
    "Define `reset_parameters()` in the class of the module that has it, so that it fills all of them in place, or "
    'build that part on a real device: `with torch.device("cpu"): ...`.'
)


def _take_deferred(root: nn.Module) -> dict[Tensor, Tensor]:
    """Put the deferred tensors of ``root`` on the meta device, in place; returns the sources of their values."""
    sources: dict[Tensor, Tensor] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        if isinstance(tensor, DeferredTensor) and (source := undefer(tensor)) is not tensor:
            sources[tensor] = source
    return sources


def _remember_loads(root: nn.Module, pending: dict[Tensor, str], loaded: dict[Tensor, Tensor]) -> list[Any]:
    """Keep references to the values that state dicts have for ``pending`` tensors, however they are loaded."""

    # A function, not a method: copies of the module share it, and their own tensors are not pending.
    def remember(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            value = state.get(prefix + key)
            if tensor in pending and isinstance(value, Tensor) and value.shape == tensor.shape:
                loaded[tensor] = value.detach()
                # So that torch copies the tensor to itself, or assigns it to its own place.
                state[prefix + key] = tensor

    own = ((part, (*part.parameters(recurse=False), *part.buffers(recurse=False))) for part in root.modules())
    owners = [part for part, tensors in own if any(tensor in pending for tensor in tensors)]
    return [module.register_load_state_dict_pre_hook(remember) for module in owners]


def _on_meta(root: nn.Module) -> dict[Tensor, str]:
    return {tensor: places[0].name for tensor, places in places_of(root).items() if lacks_values(tensor)}


def _named_tensors(root: nn.Module) -> dict[str, Tensor]:
    return dict([*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)])


def _meta_attributes(root: nn.Module) -> list[str]:
    """Problems, as text: tensors on the meta device in plain attributes, which no initialiser can find."""
    names = [
        f"{name}.{key}".lstrip(".")
        for name, module in root.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if not names:
        return []
    return [
        f"{_listed(names)} is neither a parameter nor a buffer, so no initialiser fills it. Build it on a real device: "
        '`with torch.device("cpu"): ...`.'
    ]


def _meta_states(optimizers: Sequence[Optimizer]) -> list[str]:
    """Problems, as text: optimizers that have made state already, without values."""
    return [
        f"The optimizer {type(optimizer).__name__} makes state when it is built, here for parameters without values. "
        "Use an optimizer that makes its state in its first step (Adam, SGD ...), or build the parameters on a real "
        'device: `with torch.device("cpu"): ...`.'
        for optimizer in optimizers
        if any(
            isinstance(value, Tensor) and value.is_meta
            for state in optimizer.state.values()
            for value in state.values()
        )
    ]


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
    return listed if len(names) <= MOST_NAMES else f"{listed} and {len(names) - MOST_NAMES} more"
