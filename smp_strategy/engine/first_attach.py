"""First attachment of a module: process mesh, units and tensors without values; the partition is decided later."""

from torch import nn

from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.degrees import choose_shape
from smp_strategy.engine.delayed_init import DelayedModule
from smp_strategy.engine.engine_parts import EngineParts
from smp_strategy.engine.given_partition import choose_placed_units, place_beforehand, refuse_unwritable_file
from smp_strategy.engine.layout import Layout
from smp_strategy.model.units import Unit
from smp_strategy.planning.costs import measuring_device

__all__ = ["begin_layout"]


def begin_layout(parts: EngineParts, module: nn.Module, seed: int) -> list[Unit]:
    """Make the process mesh, choose the units of ``module``, and begin an undecided layout. Collective over all ranks.

    Args:
        parts: Parts of the engine, which get the module, the mesh and the layout.
        module: Full module, perhaps without values.
        seed: Seed that all ranks have agreed on.

    Returns:
        Units in the order of the module.

    Raises:
        ConfigError: The degrees do not fit the number of ranks or of units.
    """
    config = parts.config
    shape = choose_shape(config, module, parts.report)
    measuring_device(config, parts.device)
    refuse_unwritable_file(config)
    parts.module = module
    parts.known_mesh = mesh = ProcessMesh(shape, device_type=parts.device.type, timeout=parts.timeout)
    units = choose_placed_units(config, module, shape.pp)
    given = place_beforehand(config, module, units, shape.pp)
    parts.seed = seed
    parts.delayed = DelayedModule(module, seed, parts.device)
    parts.known_layout = Layout.undecided(config, module, units, mesh, parts.device, given)
    return units
