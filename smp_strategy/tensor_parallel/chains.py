"""Chains of layers between which activations can be split along the sequence.

A chain is a list of modules of one class, each with a region that ends by rows: the blocks of a transformer. What
stands between their regions treats each token by itself, or puts the tokens together first.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from smp_strategy.tensor_parallel.region import RowParallelLayer

__all__ = ["chains"]


def chains(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, list[nn.Module]]]:
    """The outermost chains in ``modules``, whose layers are split already, by name."""
    found: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList) or any(f"{name}.".startswith(f"{outer}.") for outer in found):
            continue
        layers = list(module)
        if layers and len({type(layer) for layer in layers}) == 1 and all(map(_has_region, layers)):
            found.append(name)
            yield name, layers


def _has_region(layer: nn.Module) -> bool:
    return any(isinstance(part, RowParallelLayer) and not part.splits_input for part in layer.modules()) and any(
        layer.children()
    )
