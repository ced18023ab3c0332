"""Objects of the run in a checkpoint: a network or an optimizer among the hyperparameters is saved with whole values.

``save_hyperparameters()`` keeps the arguments of a module, and a checkpoint has them beside the weights. One of them
may be the network that is trained, an optimizer of it, or something around them (a ``partial``, a list, a loss).
During a run such an object has this rank's values only, and its layers may be split and intercepted.

So global rank 0 pickles these entries and leaves out tensors and optimizers. Their values come from all ranks. Put
into the unpickled objects, they make copies that are the objects of a single process.
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.full_state_dict import numbers_of
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.engine.saving.checkpointing import SavedState
from smp_strategy.model.guarded_tensors import in_plain_sight

__all__ = ["has_objects", "put_whole_objects"]

# These consist of tensors of the run, which are collected by other means.
_TENSORS: Final = ("state_dict", "optimizer_states")
# Of pickles, as `torch.save` has it: objects may reduce themselves differently for others.
_PROTOCOL: Final = 2


def has_objects(
    checkpoint: Mapping[str, Any],
    saved: SavedState,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    looking_plain: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> bool:
    """Whether :func:`put_whole_objects`, with the same arguments, would replace any entry. Collective."""
    with saved.looking_plain(), looking_plain():
        return collectives.tell(
            saved.is_first and bool(_found(checkpoint, _Run(module, optimizers))), 0, "the objects of a checkpoint"
        )


def put_whole_objects(
    checkpoint: dict[str, Any],
    saved: SavedState,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    looking_plain: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Replace, on global rank 0, entries of ``checkpoint`` that contain objects of the run by copies. Collective. Under
    ``looking_plain`` the door has no patches on parts of the module.
    """
    with saved.looking_plain(), looking_plain():
        checkpoint.update(_whole_objects(checkpoint, saved, _Run(module, optimizers)))


def _whole_objects(checkpoint: Mapping[str, Any], saved: SavedState, run: "_Run") -> dict[str, Any]:
    found = _found(checkpoint, run) if saved.is_first else {}
    needed = (
        sorted({name for each in found.values() for name in each.names}),
        sorted({number for each in found.values() for number in each.numbers}),
    )
    names, numbers = collectives.tell(needed, 0, "the objects of a checkpoint")
    values = saved.full_values(names) if names else {}
    states = {number: saved.full_optimizer_state(run.optimizers[number]).get("state", {}) for number in numbers}
    # Of equal tensors a file needs one.
    state = checkpoint.get("state_dict", {})
    whole = _WholeTensors(run, {name: _same(state.get(name), value) for name, value in values.items()})
    return {key: each.restored(whole, states) for key, each in found.items()}


def _found(checkpoint: Mapping[str, Any], run: "_Run") -> dict[str, "_Pickled"]:
    pickled = {key: _pickled(value, run) for key, value in checkpoint.items() if key not in _TENSORS}
    return {key: each for key, each in pickled.items() if each is not None}


@final
class _Run:
    """The tensors, modules and optimizers of a run, by their identity."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        named = (*module.named_parameters(), *module.named_buffers())
        self.names = {id(tensor): name for name, tensor in named}
        self.modules = set(map(id, module.modules()))
        self.optimizers = optimizers
        self.numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}


@final
class _WholeTensors:
    """Whole tensors in place of those of a run; each is made once."""

    def __init__(self, run: _Run, values: Mapping[str, Tensor]) -> None:
        self._run = run
        self._values = values
        self._made: dict[int, Tensor] = {}

    def of(self, tensor: Any) -> Any:
        """The whole ``tensor``, or ``tensor`` itself if it does not belong to the run."""
        name = self._run.names.get(id(tensor))
        if name is None:
            return tensor
        if id(tensor) not in self._made:
            value = self._values[name]
            if isinstance(tensor, nn.Parameter):
                with in_plain_sight():
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = value
        return self._made[id(tensor)]


@final
class _Pickled(pickle.Pickler):
    """Pickles an object without the tensors and optimizers in it.

    Attributes:
        names: Tensors of the run in it.
        numbers: Optimizers of the run in it.
        has_parts: Whether anything of the run is in it.
    """

    def __init__(self, run: _Run) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=_PROTOCOL)
        self._run = run
        self._left_out: list[Any] = []
        self.names: set[str] = set()
        self.numbers: set[int] = set()
        self.has_parts = False

    def persistent_id(self, obj: Any) -> int | None:
        """Leave out tensors, and optimizers of the run."""
        if isinstance(obj, nn.Module):
            self.has_parts = self.has_parts or id(obj) in self._run.modules
            return None
        number = self._run.numbers.get(id(obj))
        if number is None and not isinstance(obj, Tensor | torch.UntypedStorage | torch.TypedStorage):
            return None
        tensors = [obj]
        if number is not None:
            self.numbers.add(number)
            tensors = list(numbers_of(obj))
        self.names.update(self._run.names[id(tensor)] for tensor in tensors if id(tensor) in self._run.names)
        self.has_parts = self.has_parts or bool(self.names or self.numbers)
        self._left_out.append(obj)
        return len(self._left_out) - 1

    def restored(self, whole: _WholeTensors, states: Mapping[int, Mapping[int, Any]]) -> Any:
        """The object again, with ``whole`` tensors, and optimizers with ``states``."""
        made: dict[int, Any] = {}

        def load(number: Any) -> Any:
            kept = self._left_out[number]
            which = self._run.numbers.get(id(kept))
            if which is None:
                return whole.of(kept)
            if which not in made:
                made[which] = _optimizer(kept, states[which], whole)
            return made[which]

        self._file.seek(0)
        loader = pickle.Unpickler(self._file)
        loader.persistent_load = load  # type: ignore[method-assign]
        return loader.load()


def _pickled(value: Any, run: _Run) -> _Pickled | None:
    """``value`` without its tensors, if it contains something of the run."""
    pickled = _Pickled(run)
    try:
        pickled.dump(value)
    except Exception:  # it cannot be saved; whoever writes it tells
        return None
    return pickled if pickled.has_parts else None


def _optimizer(optimizer: Optimizer, state: Mapping[int, Any], whole: _WholeTensors) -> Optimizer:
    """A copy of ``optimizer`` with the whole ``state``, as a pickle has it."""
    copied = type(optimizer).__new__(type(optimizer))
    parameters = [whole.of(parameter) for parameter in numbers_of(optimizer)]
    copied.__setstate__(
        {
            "defaults": optimizer.defaults,
            "state": {parameters[number]: dict(kept) for number, kept in state.items()},
            "param_groups": [
                {**group, "params": [whole.of(each) for each in group["params"]]} for group in optimizer.param_groups
            ],
        }
    )
    return copied


def _same(saved: Any, value: Tensor) -> Tensor:
    if isinstance(saved, Tensor) and saved.device == value.device and saved.dtype == value.dtype:
        return saved if torch.equal(saved, value) else value
    return value
