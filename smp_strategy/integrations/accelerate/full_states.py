"""Full state dicts of the partitioned model, of submodules, and of models that are whole on every rank.

An Accelerator may have prepared one model that the engine runs, and others that every rank has whole. The same holds
for optimizers. A submodule may be asked for, too: ``accelerator.get_state_dict(model.encoder)``.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.checkpointing import own_state_dict
from smp_strategy.engine.saving.saved_models.shared_states import storage_of
from smp_strategy.integrations.accelerate.optimizer import unwrapped

__all__ = [
    "is_optimizer",
    "leave_file",
    "load_model",
    "path_in",
]


def path_in(root: nn.Module, module: nn.Module) -> str | None:
    """Name of ``module`` in ``root``, empty for ``root`` itself; ``None`` if it is not in there."""
    return next((name for name, each in root.named_modules(remove_duplicate=False) if each is module), None)


def is_optimizer(candidate: Any) -> bool:
    """Whether ``candidate`` is an optimizer, the user's or Accelerate's wrapper."""
    return isinstance(unwrapped([candidate])[0], Optimizer)


def leave_file(optimizer: Any) -> None:
    """Copy loaded optimizer state out of a memory-mapped file, which may be overwritten later."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[name] = value.clone()


def load_model(
    engine: Engine | None, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a full state dict; it may list tied tensors under only one of their names.

    Args:
        engine: runs ``module``; ``None``: this rank has all of it.
        module: receives the values.
        state: from a file.
        strict: whether names must match.

    Returns:
        Names that are missing in ``state``, and unexpected ones.

    Raises:
        RuntimeError: names or shapes do not match.
    """
    own = own_state_dict(module)
    state = _with_all_names(own, state)
    if engine is None:
        module.load_state_dict(state, strict=strict)
    else:
        engine.saved.load_state_dict(state, strict)
    return sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())


def _with_all_names(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Add the missing names of tied tensors to ``state``: safetensors files keep only one of them."""
    full = OrderedDict(state)
    if hasattr(state, "_metadata"):
        full._metadata = state._metadata  # type: ignore[attr-defined]
    names: dict[Any, list[str]] = {}
    for name, tensor in own.items():
        if isinstance(tensor, Tensor):
            names.setdefault(storage_of(tensor), []).append(name)
    for group in names.values():
        for there in [name for name in group if name in full][:1]:
            for name in group:
                full.setdefault(name, full[there])
    return full
