"""First attachment of a module: equal values on all ranks, process mesh and units; the partition is decided later.

Annotations on modules (stages, checkpointing) are checked here and read again in the first step: scripts may add some
after the model is wrapped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import META_TENSORS, MODEL, refused_meta
from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.degrees import choose_shape
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.given_partition import choose_placed_units, place_beforehand, refuse_unwritable_file
from smp_strategy.engine.layout import Layout
from smp_strategy.errors import ConfigError
from smp_strategy.model.annotations import placed_modules
from smp_strategy.model.deferred_tensor import DeferredTensor, lacks_values
from smp_strategy.model.units import Unit
from smp_strategy.planning.costs import measuring_device

__all__ = ["begin_layout", "lay_out", "serves", "start_alike"]


def start_alike(module: nn.Module, ledger: Ledger, *, may_lack_values: bool = False) -> int:
    """Broadcast the parameters and buffers of rank 0 to all ranks; collective.

    Args:
        ledger: Earlier notes, compared together with the model.
        may_lack_values: Whether tensors may be on the meta device, the same ones on all ranks.

    Returns:
        A seed that is equal on all ranks: that of rank 0's generator.

    Raises:
        ConfigError: tensors are on the meta device, and may not be; or a lazy layer has no shapes yet.
        SMPError: ranks have different tensors on the meta device, different parameters, or train different ones.
    """
    tensors = {tensor: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    _refuse_lazy([name for tensor, name in tensors.items() if is_lazy(tensor)])
    without_values = [name for tensor, name in tensors.items() if lacks_values(tensor)]
    ledger.note(META_TENSORS, (may_lack_values, without_values))
    ledger.note(MODEL, [(name, _described(tensor)) for tensor, name in tensors.items()])
    ledger.compare("the beginning of training")
    if without_values and not may_lack_values:
        raise refused_meta(without_values[0])
    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64, device="cpu")
    collectives.broadcast(seed, 0, group=None, doing="the seed of rank 0").wait()
    with torch.no_grad():
        for tensor in tensors:
            if not lacks_values(tensor):
                collectives.broadcast(tensor.detach(), 0, group=None, doing="the weights of rank 0").wait()
    return int(seed)


def _described(tensor: Tensor) -> str:
    # Values that are read later cannot be broadcast from rank 0.
    history = tensor.history if isinstance(tensor, DeferredTensor) else ()
    changes = f", changed by {' and '.join(history)}" if history else ""
    is_trained = "trained" if tensor.requires_grad else "not trained"
    return f"of shape {list(tensor.shape)}, {tensor.dtype}, {is_trained}{changes}"


def _refuse_lazy(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(
            f"`{names[0]}` belongs to a lazy layer that has not seen an input yet ({len(names)} tensors have no "
            "shape), and the model is laid out over the ranks by its shapes. Call the model once with a batch, or with "
            f"`torch.zeros` of the size of one, under `torch.no_grad()`: {door_words().first_pass}."
        )


def begin_layout(parts: EngineParts, module: nn.Module, seed: int, *, is_placed: bool) -> None:
    """Make the process mesh, choose the units of ``module``, and begin an undecided layout. Collective over all ranks.
    If ``is_placed`` is false the user may place modules until the first step.

    Raises:
        ConfigError: The degrees do not fit the number of ranks or of units.
    """
    config = parts.config
    shape = choose_shape(config, module, parts.report)
    measuring_device(config, parts.device)
    refuse_unwritable_file(config)
    parts.module = module
    parts.known_mesh = ProcessMesh(shape, device_type=parts.device.type, timeout=parts.timeout)
    lay_out(parts, is_placed=is_placed)
    parts.seed = seed
    parts.delayed = DelayedModule(module, seed, parts.device)


def lay_out(parts: EngineParts, *, is_placed: bool = True) -> None:
    """Choose units and begin an undecided layout, by the annotations of the attached module now. Collective.

    Raises:
        ConfigError: The annotations do not fit the degrees or the options.
    """
    config, mesh, module, before = parts.config, parts.mesh, parts.module, parts.known_layout
    assert module is not None
    units = choose_placed_units(config, module, mesh.pp)
    is_known = is_placed or config.auto_partition
    given = place_beforehand(config, module, units, mesh.pp) if is_known else None
    layout = parts.known_layout = Layout.undecided(config, module, units, mesh, parts.device, given)
    if before is not None:
        layout.group = before.group
        if not _are_same(before.units, units):
            parts.calls.give_back()
            parts.calls.intercept(units, module)


def serves(parts: EngineParts, module: nn.Module) -> bool:
    """Whether ``module`` is the attached one, with the units and stages of the partition, if there is one."""
    if parts.module is not module or parts.partition is None:
        return parts.module is module
    units = choose_placed_units(parts.config, module, parts.mesh.pp)
    return placed_modules(module) == parts.layout.placed and _are_same(units, parts.layout.units)


def _are_same(units: Sequence[Unit], others: Sequence[Unit]) -> bool:
    return [id(unit.module) for unit in units] == [id(unit.module) for unit in others]
